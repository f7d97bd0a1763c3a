"""Heads, activation and epsilon, which no timm file states: read from the model that timm builds on the meta device."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.positions import GridRotary
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import CheckpointError, one_line
from multimodal.models.vit import STEM_STRIDES, ViTConfig
from multimodal.system.files import shown

POOLS = {"token": "token", "avg": "mean", "map": "map"}
BLOCKS = {"VisionTransformer": ("Block",), "VisionTransformerDistilled": ("Block",), "Beit": ("Block",),
          "Eva": ("EvaBlock", "EvaBlockPostNorm")}  # fmt: skip
FEEDS = {"Mlp": False, "GluMlp": True, "SwiGLU": True}  # True: gated


def timm_model(architecture: str, **options: Any) -> nn.Module:
    """timm's ViT on the meta device. Raises CheckpointError if it is unknown or not one that we have."""
    return plain(timm_built(architecture, **options), architecture)


def timm_built(architecture: str, **options: Any) -> nn.Module:
    """timm's model on the meta device. Raises CheckpointError if it is unknown, and for names and options that would
    make timm read files, since both come from the checkpoint."""
    import timm
    from timm.models.beit import Beit
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise CheckpointError(f"timm has no model {shown(architecture)}")
    kinds = (VisionTransformer, Eva, Beit)
    known = {name for kind in kinds for name in inspect.signature(kind).parameters} - {"device", "dtype"}
    if other := options.keys() - known - {"pretrained_cfg"}:
        raise CheckpointError(f"timm's {architecture!r} has no option {shown(min(other))}")
    name, tag = timm.models.split_model_name_tag(architecture)
    options = ({"pretrained_cfg": tag} if tag else {}) | options
    try:
        with torch.device("meta"):  # create_model drops options that are None
            return timm.models.model_entrypoint(name)(pretrained=False, **options)
    except Exception as error:  # timm raises RuntimeError, TypeError, ValueError and AssertionError
        raise CheckpointError(f"timm cannot build {architecture!r} ({one_line(error)})") from None


def plain(model: nn.Module, architecture: str) -> nn.Module:
    """Return the model. Raises CheckpointError unless it is a ViT that we have."""
    if difference := _differs(model):
        raise CheckpointError(f"timm's {architecture!r} is not a plain ViT ({difference})")
    return model


def _differs(model: nn.Module) -> str:
    """Describe a difference from our ViT, or ''. Extra parts with weights show as extra tensors at load."""
    name = type(model).__name__
    if name not in BLOCKS:
        return f"class {name}"
    if others := {type(block).__name__ for block in model.blocks} - {*BLOCKS[name]}:
        return f"blocks of class {min(others)}"
    block, patch = model.blocks[0], model.patch_embed
    attention = block.attn
    if model.global_pool not in POOLS:
        return f"global_pool {model.global_pool!r}"
    if getattr(model, "pool_include_prefix", False) and model.global_pool == "avg":
        return "pool_include_prefix True with global_pool 'avg'"
    if getattr(model, "in_chans", 3) != 3:
        return f"in_chans {model.in_chans}"
    square = type(patch).__name__ == "PatchEmbed" and patch.patch_size[0] == patch.patch_size[1]
    if not (square or _conv_stem(patch)):
        return f"{type(patch).__name__}, patch {patch.patch_size}"
    if square and patch.dynamic_img_pad and any(side % patch.patch_size[0] for side in patch.img_size):
        return f"dynamic_img_pad True with images of {patch.img_size}"
    if attention.proj.bias is None or getattr(attention, "gate", None) is not None:
        return f"proj_bias {attention.proj.bias is not None} or a gate of attention"
    if any(getattr(one.attn, "num_kv_heads", None) not in (None, one.attn.num_heads) for one in model.blocks):
        return "num_kv_heads"
    if type(block.mlp).__name__ not in FEEDS or getattr(block.mlp, "gate_last", False):
        return f"{type(block.mlp).__name__}"
    kinds = {type(norm).__name__ for part in model.modules() for name, norm in part.named_children() if "norm" in name}
    if kinds - {"LayerNorm", "Identity"}:
        return f"norm {', '.join(sorted(kinds - {'LayerNorm', 'Identity'}))}"
    if getattr(model, "rel_pos_bias", None) is not None:
        return "relative positions that all blocks share"
    if (getattr(block, "gamma_1", None) is None) != (getattr(block, "gamma_2", None) is None):
        return "layer scale of attention alone"
    rope = getattr(model, "rope", None)
    if rope is not None and _rotary(rope) is None:
        return f"positions {type(rope).__name__}"
    return ""


def vit_config(model: nn.Module) -> ViTConfig:
    """Configuration of a timm model."""
    late, rope, pool = _normed(model, "fc_norm"), getattr(model, "rope", None), POOLS[model.global_pool]
    distilled = type(model).__name__ == "VisionTransformerDistilled"
    registers = getattr(model, "reg_token", None)
    made = ViTConfig(
        tuple(model.patch_embed.img_size), model.patch_embed.feat_ratio(),
        StackConfig(_block(model.blocks[0], model.patch_embed.grid_size), len(model.blocks), _normed(model, "norm")),
        "pair" if distilled else pool, model.cls_token is not None,
        1 if distilled else 0 if registers is None else registers.shape[1], not getattr(model, "no_embed_class", False),
        _last_conv(model.patch_embed).bias is not None, _normed(model, "norm_pre"), late, classes=model.num_classes,
        map_prefix=getattr(model, "pool_include_prefix", True) or type(model).__name__ == "Eva",
        positions=model.pos_embed is not None, rotary=None if rope is None else _rotary(rope),
        conv_stem=_conv_stem(model.patch_embed),
    )  # fmt: skip
    if pool != "map":
        return made
    own, feed = model.attn_pool, model.attn_pool.mlp
    return replace(made, pool_heads=own.num_heads, pool_hidden=feed.fc1.out_features,
                   pool_activation=_activation(feed.act))  # fmt: skip


def _conv_stem(patch: nn.Module) -> int:
    """Width of the convolutions before the patches' map (MobileCLIP-B's stem); 0 without them."""
    stem = getattr(patch, "backbone", None)
    if type(stem).__name__ != "ConvStem" or len(stem) != 3 or not isinstance(patch.proj, nn.Identity):
        return 0
    alike = [(one.conv.kernel_size, one.conv.stride, one.conv.padding) for one in stem]
    known = [((side, side), (side, side), (0, 0)) for side in (*STEM_STRIDES, 2)]
    return stem[0].conv.out_channels if alike == known and type(stem[0].bn.act).__name__ == "GELU" else 0


def _last_conv(patch: nn.Module) -> nn.Module:
    return patch.backbone[-1].conv if _conv_stem(patch) else patch.proj


def _normed(part: nn.Module, name: str) -> bool:
    return isinstance(getattr(part, name, None), nn.LayerNorm)


def _block(block: nn.Module, grid: tuple[int, int]) -> BlockConfig:
    own, feed = block.attn, block.mlp
    fused = getattr(own, "qkv", None)
    apart = fused is None or getattr(own, "q_bias", None) is not None  # the key's bias is zero or of its own
    query = own.q_proj.bias is not None if fused is None else apart or fused.bias is not None
    key = query if not apart else fused is None and own.k_proj.bias is not None
    width, heads, inner = own.proj.out_features, own.num_heads, own.proj.in_features
    eps = next((norm.eps for name in ("q_norm", "norm") if _normed(own, name) and (norm := getattr(own, name))), 1e-6)
    attention = AttentionConfig(
        width, heads, head_width=None if inner == width else inner // heads, key_bias=key, qkv_bias=query,
        qk_norm="layer" if _normed(own, "q_norm") else None, qk_norm_eps=eps, inner_norm=_normed(own, "norm"),
        grid=None if getattr(own, "relative_position_bias_table", None) is None else tuple(grid),
    )  # fmt: skip
    scaled = type(getattr(block, "ls1", None)).__name__ == "LayerScale" or getattr(block, "gamma_1", None) is not None
    after = type(block).__name__ == "EvaBlockPostNorm"
    return BlockConfig(
        attention, feed.fc2.in_features, _activation(feed.act), FEEDS[type(feed).__name__], norm_eps=block.norm1.eps,
        pre_norm=not after, out_norm=after, layer_scale=scaled, feed_norm=_normed(feed, "norm"),
    )  # fmt: skip


def _rotary(rope: nn.Module) -> GridRotary | None:
    """None for positions that we do not have."""
    centred = type(rope).__name__ == "RotaryEmbeddingDinoV3"
    if not centred and type(rope).__name__ != "RotaryEmbeddingCat":
        return None
    common = {"column_first": rope.grid_indexing == "xy", "interleaved": not rope.rotate_half}
    if centred and (rope.grid_offset, rope.min_period, rope.normalize_coords) == (0, None, "separate"):
        return GridRotary(float(rope.temperature), centers=True, **common)
    if centred or rope.in_pixels or rope.grid_type != "index":
        return None
    reference = None if rope.ref_feat_shape is None else tuple(rope.ref_feat_shape)
    return GridRotary(float(rope.temperature), False, reference, float(rope.grid_offset), **common)


def _activation(module: nn.Module) -> str:
    name = type(module).__name__ + ("Tanh" if getattr(module, "approximate", "none") == "tanh" else "")
    known = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}
    if name not in known:
        raise CheckpointError(f"timm's activation {name} is not supported")
    return known[name]
