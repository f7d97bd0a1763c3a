"""Tiny random CLIPs of open_clip with convolutional image towers, for test_conv_towers.py."""

import warnings
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.helpers.references.vision import CONTEXT, VOCABULARY

TEXT = {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 24, "heads": 3, "layers": 2}
FASTVIT = {"layers": (1, 2, 1), "embed_dims": (16, 32, 64), "mlp_ratios": (2, 2, 2)}
TRUNKS: dict[str, dict[str, Any]] = {
    "convnext_tiny": {"depths": (1, 2, 1, 1), "dims": (16, 24, 32, 40)},
    "convnext_xxlarge": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 40)},
    "fastvit_mci0": FASTVIT | {"se_downsamples": (False, True, True), "token_mixers": ("repmixer", "repmixer",
                                                                                       "attention")},
    "fastvit_mci3": FASTVIT | {"se_downsamples": (False,) * 3, "downsamples": (False, True, True),
                               "token_mixers": ("repmixer", "attention", "attention")},
    "vit_base_mci_224": {"depth": 1},
}  # fmt: skip
# family of ours, size of the images, a custom text tower, image configuration, further keys
CASES: dict[str, tuple[str, int, bool, dict[str, Any], dict[str, Any]]] = {
    "ResNet": ("open_clip-resnet", 64, False, {"layers": [1, 2, 1, 1], "width": 8}, {"quick_gelu": True}),
    "ResNet, text apart": ("open_clip-resnet-custom-text", 96, True, {"layers": [2, 1, 1, 2], "width": 8}, {}),
    "ConvNeXt": ("open_clip-timm-flat-convnext", 64, False, {"timm_model_name": "convnext_tiny", "timm_pool": ""}, {}),
    "ConvNeXt, two layers": ("open_clip-timm-flat-convnext", 64, False, {
        "timm_model_name": "convnext_xxlarge", "timm_pool": "", "timm_proj": "mlp"}, {}),
    "MobileCLIP, S2": ("open_clip-timm-fastvit", 64, True, {"timm_model_name": "fastvit_mci0", "timm_proj": None}, {}),
    "MobileCLIP, S3": ("open_clip-timm-fastvit", 64, True, {"timm_model_name": "fastvit_mci3", "timm_proj": None}, {}),
    "MobileCLIP, B": ("open_clip-timm-stem", 224, True, {
        "timm_model_name": "vit_base_mci_224", "timm_pool": "token", "timm_proj": None}, {}),
}  # fmt: skip


def small(record: dict[str, Any]) -> Any:
    """Context in which timm makes the tiny trunk of a configuration, at any place that names it."""
    from timm.models import _registry, model_entrypoint

    name = record["vision_cfg"].get("timm_model_name")
    own = {name: partial(model_entrypoint(name), **_sizes(name))} if name else {}
    return patch.dict(_registry._model_entrypoints, own)


def _sizes(name: str) -> dict[str, Any]:
    from timm.models.fastvit import RepConditionalPosEnc

    sizes = TRUNKS.get(name, {})
    mixers = sizes.get("token_mixers")
    return sizes | {"pos_embs": tuple(RepConditionalPosEnc if one == "attention" else None for one in mixers)} \
        if mixers else sizes  # fmt: skip


@torch.no_grad()
def moved(model: nn.Module) -> nn.Module:
    """Add noise to each weight and statistic, for zeros and ones would hide a swap; variances stay positive."""
    noise = torch.Generator().manual_seed(3)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=noise) * 0.1 + 0.5 * ("gamma" in name))
        if name.endswith("running_var"):
            tensor.abs_().add_(0.3)
    return model.eval()


@lru_cache
def reference(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of open_clip, and its configuration."""
    from open_clip.model import CLIP, CustomTextCLIP

    _, size, custom, vision, top = CASES[name]
    record = {"embed_dim": 24, "vision_cfg": {"image_size": size} | vision, "text_cfg": TEXT} | top
    torch.manual_seed(0)
    with warnings.catch_warnings(), small(record):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return moved((CustomTextCLIP if custom else CLIP)(**record)), record


def tensors(name: str) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in reference(name)[0].state_dict().items()}
