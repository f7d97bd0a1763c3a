"""Tiny random vision transformers of transformers and timm, by family, for test_vit_families.py."""

import re
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from multimodal.weights.files.tensor_files import read_tensors
from tests.helpers.references.case import Case
from tests.helpers.references.vision import randomized

SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
         "image_size": 32, "patch_size": 8, "num_labels": 5}  # fmt: skip
RELATIVE = {"use_relative_position_bias": True}
# family, transformers' class, options
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ViT": ("vit", "ViTForImageClassification", {}),
    "ViT, pooler": ("vit", "ViTModel", {"hidden_act": "gelu_fast"}),
    "DeiT": ("deit", "DeiTForImageClassificationWithTeacher", {}),
    "DeiT, one head": ("deit", "DeiTForImageClassification", {"qkv_bias": False}),
    "DeiT, pooler": ("deit", "DeiTModel", {}),
    "DINOv2": ("dinov2", "Dinov2Model", {"mlp_ratio": 2}),
    "DINOv2, gated classifier": ("dinov2", "Dinov2ForImageClassification", {"use_swiglu_ffn": True}),
    "DINOv2, registers": ("dinov2_with_registers", "Dinov2WithRegistersModel", {"num_register_tokens": 3}),
    "DINOv2, registers, classifier": ("dinov2_with_registers", "Dinov2WithRegistersForImageClassification", {}),
    "DINOv3": ("dinov3_vit", "DINOv3ViTModel", {"num_register_tokens": 4}),
    "DINOv3, gated": ("dinov3_vit", "DINOv3ViTModel", {"use_gated_mlp": True, "hidden_act": "silu", "key_bias": True}),
    "BEiT": ("beit", "BeitForImageClassification", RELATIVE),
    "BEiT, class token": ("beit", "BeitModel", {"use_mean_pooling": False, "use_absolute_position_embeddings": True,
                                                "layer_scale_init_value": 0.0, "use_mask_token": True}),
}  # fmt: skip
TIMM_SIZES = {"embed_dim": 48, "depth": 3, "num_heads": 3, "img_size": 32, "patch_size": 8}
DYNAMIC = {"dynamic_img_size": True}
# family, timm's architecture, options
TIMM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "timm EVA": ("timm", "eva_giant_patch14_224", {}),
    "timm EVA-02": ("timm-apart", "eva02_base_patch14_224", DYNAMIC),
    "timm EVA-02 of CLIP": ("timm-apart", "eva02_base_patch16_clip_224", DYNAMIC),
    "timm EVA-02, tiny": ("timm", "eva02_tiny_patch14_224", DYNAMIC),
    "timm EVA-02, norms after": ("timm", "eva02_enormous_patch14_clip_224", {}),
    "timm PE-Core": ("timm", "vit_pe_core_base_patch16_224", DYNAMIC),
    "timm PE-Lang": ("timm-gamma", "vit_pe_lang_large_patch14_448", DYNAMIC),
    "timm PE-Spatial": ("timm", "vit_pe_spatial_base_patch16_512", DYNAMIC),
    "timm RoPE ViT": ("timm-gamma", "vit_base_patch16_rope_224", {"init_values": 0.1}),
    "timm DINOv3": ("timm-gamma", "vit_base_patch16_dinov3", {}),
    "timm DINOv3, biases, token": ("timm-gamma", "vit_base_patch16_dinov3_qkvb", {"global_pool": "token"}),
    "timm DINOv3, gated": ("timm-gates", "vit_small_plus_patch16_dinov3", {}),
    "timm DINOv2, gated": ("timm", "vit_giant_patch14_dinov2", DYNAMIC),
    "timm ViT, norms of queries and keys": ("timm", "vit_base_patch16_224", {"qk_norm": True}),
    "timm BEiT": ("timm-gamma", "beit_base_patch16_224", {}),
    "timm DeiT, distilled": ("timm", "deit_base_distilled_patch16_224", {}),
}


@lru_cache
def case(name: str) -> Case:
    if name in TIMM:
        return _of_timm(*TIMM[name])
    import transformers

    family, kind, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, re.sub("(Model|For.*)$", "Config", kind))(**SIZES | options)
    model = randomized(getattr(transformers, kind)(config)).eval()
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        held = read_tensors(Path(folder) / "model.safetensors")
    return Case(f"{family}-hf", config.to_dict() | {"architectures": [kind]}, model, held)


def _of_timm(family: str, architecture: str, options: dict[str, Any]) -> Case:
    import timm

    torch.manual_seed(0)
    args = TIMM_SIZES | options
    model = randomized(timm.create_model(architecture, num_classes=5, **args)).eval()
    config = {"architecture": architecture, "num_classes": 5, "model_args": args, "global_pool": model.global_pool}
    return Case(family, config, model, dict(model.state_dict()))
