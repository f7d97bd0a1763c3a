"""Sizes in the public config.json files of released vision transformers, and their numbers of parameters."""

from typing import Any

BASE, LARGE = (768, 12, 12, 3072), (1024, 24, 16, 4096)
RELATIVE = {"use_relative_position_bias": True, "layer_norm_eps": 1e-12}


def _vit(kind: str, sizes: tuple[int, int, int, int], image: int, patch: int, **options: Any) -> dict[str, Any]:
    width, layers, heads, hidden = sizes
    return {"model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "intermediate_size": hidden, "image_size": image, "patch_size": patch, **options}  # fmt: skip


def _dino(sizes: tuple[int, int, int, int], registers: int = 0, **options: Any) -> dict[str, Any]:
    kind = "dinov2_with_registers" if registers else "dinov2"
    return _vit(kind, sizes, 518, 14, mlp_ratio=4, **options) | ({"num_register_tokens": 4} if registers else {})


def _dinov3(sizes: tuple[int, int, int, int], **options: Any) -> dict[str, Any]:
    return _vit("dinov3_vit", sizes, 224, 16, num_register_tokens=4, rope_theta=100.0, **options)


# name: configuration, class of transformers, parameters without those of the unused mask token
RELEASED: dict[str, tuple[dict[str, Any], str, int]] = {
    "google/vit-base-patch16-224": (_vit("vit", BASE, 224, 16), "ViTForImageClassification", 86_567_656),
    "google/vit-base-patch16-224-in21k": (_vit("vit", BASE, 224, 16), "ViTModel", 86_389_248),
    "google/vit-large-patch16-384": (_vit("vit", LARGE, 384, 16), "ViTForImageClassification", 304_715_752),
    "facebook/dino-vits8": (_vit("vit", (384, 12, 6, 1536), 224, 8), "ViTModel", 21_670_272),
    "facebook/deit-base-distilled-patch16-224": (
        _vit("deit", BASE, 224, 16), "DeiTForImageClassificationWithTeacher", 87_338_192),
    "facebook/dinov2-small": (_dino((384, 12, 6, 1536)), "Dinov2Model", 22_056_192),
    "facebook/dinov2-base": (_dino(BASE), "Dinov2Model", 86_579_712),
    "facebook/dinov2-large": (_dino(LARGE), "Dinov2Model", 304_367_616),
    "facebook/dinov2-giant": (
        _dino((1536, 40, 24, 0), use_swiglu_ffn=True), "Dinov2Model", 1_136_479_232),
    "facebook/dinov2-base-imagenet1k-1-layer": (_dino(BASE), "Dinov2ForImageClassification", 88_116_712),
    "facebook/dinov2-with-registers-base": (_dino(BASE, 4), "Dinov2WithRegistersModel", 86_582_784),
    "facebook/dinov2-with-registers-giant": (
        _dino((1536, 40, 24, 0), 4, use_swiglu_ffn=True), "Dinov2WithRegistersModel", 1_136_485_376),
    "facebook/dinov3-vits16-pretrain-lvd1689m": (_dinov3((384, 12, 6, 1536)), "DINOv3ViTModel", 21_596_160),
    "facebook/dinov3-vits16plus-pretrain-lvd1689m": (
        _dinov3((384, 12, 6, 1536), use_gated_mlp=True, hidden_act="silu"), "DINOv3ViTModel", 28_692_480),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": (_dinov3(BASE), "DINOv3ViTModel", 85_659_648),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": (_dinov3(LARGE), "DINOv3ViTModel", 303_128_576),
    "facebook/dinov3-vith16plus-pretrain-lvd1689m": (
        _dinov3((1280, 32, 20, 5120), use_gated_mlp=True, hidden_act="silu"), "DINOv3ViTModel", 840_591_360),
    "facebook/dinov3-vit7b16-pretrain-lvd1689m": (
        _dinov3((4096, 40, 32, 8192), use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False),
        "DINOv3ViTModel", 6_716_030_976),
    "microsoft/beit-base-patch16-224": (
        _vit("beit", BASE, 224, 16, **RELATIVE), "BeitForImageClassification", 86_530_984),
    "microsoft/beit-large-patch16-384": (
        _vit("beit", LARGE, 384, 16, **RELATIVE), "BeitForImageClassification", 304_998_888),
}  # fmt: skip
