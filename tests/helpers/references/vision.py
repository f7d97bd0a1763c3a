"""Tiny random models of open_clip, transformers and timm and their outputs, for test_weights_vision.py."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.weights.family import Family
from multimodal.weights.vision import chinese_clip, clip_hf, clip_openai, open_clip_trunk, siglip, vit_timm

VOCABULARY, CONTEXT = 50, 9


@dataclass(frozen=True)
class VisionCase:
    """`outputs(model, images, ids)`: reference outputs by the names of `ours`."""

    family: Family
    config: dict[str, Any]
    reference: nn.Module
    outputs: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]
    image: tuple[int, int]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.reference.state_dict().items()}


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """Randomize every weight: zeros and ones would hide a missing or swapped tensor."""
    noise = torch.Generator().manual_seed(3)
    for tensor in model.state_dict().values():
        tensor.add_(torch.randn(tensor.shape, generator=noise) * 0.15)
    return model.eval()


def open_clip_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    made = model.forward_intermediates(
        images, ids, output_logits=True, image_output_fmt="NLC", image_output_extra_tokens=True,
        normalize_intermediates=not model.visual.final_ln_after_pool,
    )  # fmt: skip
    tokens = torch.cat([made["image_intermediates_prefix"][-1], made["image_intermediates"][-1]], 1)
    return {
        "image features": made["image_features"], "text features": made["text_features"],
        "logits": made["image_logits"], "image tokens": tokens,
    }  # fmt: skip


def open_clip_case(family: Family, custom: bool = False, vision: dict | None = None, text: dict | None = None,
                   **top: Any) -> VisionCase:  # fmt: skip
    from open_clip.model import CLIP, CustomTextCLIP

    if "timm_model_name" not in (vision := vision or {}):
        vision = {"image_size": [24, 16], "layers": 2, "width": 32, "head_width": 16, "patch_size": 8} | vision
    text = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 24, "heads": 3, "layers": 3} | (text or {})
    record = {"embed_dim": 20, "vision_cfg": vision, "text_cfg": text} | top
    torch.manual_seed(0)
    model = (CustomTextCLIP if custom else CLIP)(**record)
    return VisionCase(family, {"model_cfg": record}, randomized(model), open_clip_outputs, (24, 16))


def hf_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    made = model(input_ids=ids, pixel_values=images)
    norm = model.vision_model.post_layernorm  # CLIP's states come before the last norm, SigLIP's after it
    tokens = made.vision_model_output.last_hidden_state
    return {
        "image features": made.image_embeds, "text features": made.text_embeds, "logits": made.logits_per_image,
        "image tokens": tokens if model.config.model_type == "siglip" else norm(tokens),
        "text tokens": made.text_model_output.last_hidden_state,
    }  # fmt: skip


HF_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
           "num_attention_heads": 3, "max_position_embeddings": CONTEXT}  # fmt: skip
HF_VISION = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
             "image_size": 24, "patch_size": 8}  # fmt: skip


def clip_hf_case(eos: int, **options) -> VisionCase:
    from transformers import CLIPConfig, CLIPModel

    text = HF_TEXT | {"eos_token_id": eos} | options
    config = CLIPConfig(text_config=text, vision_config=HF_VISION | options, projection_dim=20)
    return VisionCase(clip_hf.FAMILY, config.to_dict(), randomized(CLIPModel(config)), hf_outputs, (24, 24))


def metaclip2_case() -> VisionCase:
    from transformers import MetaClip2Config, MetaClip2Model

    config = MetaClip2Config(text_config=HF_TEXT | {"eos_token_id": 2}, vision_config=HF_VISION, projection_dim=20)
    return VisionCase(clip_hf.FAMILY, config.to_dict(), randomized(MetaClip2Model(config)), hf_outputs, (24, 24))


def chinese_clip_case() -> VisionCase:
    from transformers import ChineseCLIPConfig, ChineseCLIPModel

    config = ChineseCLIPConfig(text_config=HF_TEXT, vision_config=HF_VISION, projection_dim=20)
    model = randomized(ChineseCLIPModel(config))
    return VisionCase(chinese_clip.FAMILY, config.to_dict(), model, hf_outputs, (24, 24))


def siglip_case() -> VisionCase:
    from transformers import SiglipConfig, SiglipModel

    config = SiglipConfig(text_config=HF_TEXT | {"projection_size": 32}, vision_config=HF_VISION)
    return VisionCase(siglip.FAMILY, config.to_dict(), randomized(SiglipModel(config)), hf_outputs, (24, 24))


def timm_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    tokens = model.forward_features(images)
    return {"image tokens": tokens, "image features": model.forward_head(tokens, pre_logits=True),
            "logits": model(images)}  # fmt: skip


def timm_case(architecture: str, image: tuple[int, int], **args) -> VisionCase:
    import timm

    args = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": image} | args
    model = timm.create_model(architecture, num_classes=7, **args)
    config = {"architecture": architecture, "num_classes": 7, "model_args": args, "global_pool": model.global_pool}
    return VisionCase(vit_timm.FAMILY, config, randomized(model), timm_outputs, image)


def trunk_case(family: Family, trunk: str, image: int, vision: dict, custom: bool = True, **top) -> VisionCase:
    text = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
            "act_kwargs": {"approximate": "tanh"}}  # fmt: skip
    made = open_clip_case(
        family, custom, vision={"timm_model_name": trunk, "image_size": image, **vision},
        text=text if custom else {"proj_type": "none", "width": top["embed_dim"], "heads": 4}, **top,
    )  # fmt: skip
    return replace(made, outputs=trunk_outputs, image=(image, image))


def trunk_outputs(model: nn.Module, images: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {
        "image features": model.encode_image(images, normalize=True),
        "text features": model.encode_text(ids, normalize=True),
        "logits": model.get_logits(images, ids)[0], "image tokens": model.visual.trunk.forward_features(images),
    }  # fmt: skip


CASES: dict[str, Callable[[], VisionCase]] = {
    "OpenCLIP": lambda: open_clip_case(clip_openai.FAMILY, quick_gelu=True),
    "OpenCLIP, CLIPA": lambda: open_clip_case(
        clip_openai.FAMILY, init_logit_bias=-10.0,
        vision={"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True, "ls_init_value": 0.1},
        text={"pool_type": "last", "no_causal_mask": True},
    ),
    "OpenCLIP, text apart": lambda: open_clip_case(
        clip_openai.CUSTOM_TEXT, custom=True, text={"pool_type": "eos", "eos_id": 2, "mlp_ratio": 3.5},
    ),
    "Hugging Face CLIP": lambda: clip_hf_case(2),
    "Hugging Face CLIP, GELU": lambda: clip_hf_case(VOCABULARY - 1, hidden_act="gelu"),
    "timm ViT, class token": lambda: timm_case("vit_tiny_patch16_224", (48, 32)),
    "timm ViT, mean pool": lambda: timm_case(
        "vit_base_patch16_gap_224", (32, 32), dynamic_img_size=True, qkv_bias=False,
    ),
    "timm ViT, registers": lambda: timm_case(
        "vit_tiny_patch16_224", (32, 64), reg_tokens=3, no_embed_class=True, init_values=0.1, dynamic_img_size=True,
    ),
    "timm ViT, map pool": lambda: timm_case("test_vit3", (32, 32), class_token=True, pool_include_prefix=False),
    "timm ViT of CLIP": lambda: timm_case("vit_base_patch32_clip_quickgelu_224", (64, 64), dynamic_img_size=True),
    "MetaCLIP 2": metaclip2_case,
    "Chinese-CLIP": chinese_clip_case,
    "Hugging Face SigLIP": siglip_case,
    "OpenCLIP SigLIP": lambda: trunk_case(
        open_clip_trunk.FAMILIES[0], "test_vit3", 160, {"timm_pool": "map", "timm_proj": "none"}, embed_dim=96,
        init_logit_bias=-10.0,
    ),
    "OpenCLIP on a timm trunk": lambda: trunk_case(
        open_clip_trunk.FLAT_FAMILIES[0], "test_vit2", 160, {"timm_pool": "", "timm_proj": "linear"}, custom=False,
        embed_dim=20,
    ),
}  # fmt: skip


@lru_cache
def case(name: str) -> VisionCase:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # the reference libraries' own
        from tests.helpers.references.captions import CAPTIONERS

        return (CASES | CAPTIONERS)[name]()


def random_images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))


def load(name: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    made = case(name)
    return made.family.load(made.tensors if tensors is None else tensors, made.config, "file").model
