"""Heads, activation and epsilon, which no timm file states: read from the model that timm builds on the meta device."""

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.vit import ViTConfig
from multimodal.system.files import shown

POOLS = {"token": "token", "avg": "mean", "map": "map"}


def timm_model(architecture: str, **options: Any) -> nn.Module:
    """timm's model on the meta device. Raises CheckpointError if it is unknown or not a plain ViT, and for names and
    options that would make timm read files, since both come from the checkpoint."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(architecture, str) or not timm.is_model(architecture):
        raise CheckpointError(f"timm has no model {shown(architecture)}")
    known = inspect.signature(VisionTransformer).parameters.keys() - {"device", "dtype"} | {"pretrained_cfg"}
    if other := options.keys() - known:
        raise CheckpointError(f"timm's {architecture!r} has no option {shown(min(other))}")
    try:
        with torch.device("meta"):
            model = timm.create_model(architecture, pretrained=False, **options)
    except Exception as error:  # timm raises RuntimeError, TypeError, ValueError and AssertionError
        raise CheckpointError(f"timm cannot build {architecture!r} ({' '.join(str(error).split())})") from None
    return plain(model, architecture)


def plain(model: nn.Module, architecture: str) -> nn.Module:
    """Return the model. Raises CheckpointError unless it is a plain ViT."""
    if difference := _differs(model):
        raise CheckpointError(f"timm's {architecture!r} is not a plain ViT ({difference})")
    return model


def _differs(model: nn.Module) -> str:
    """Describe a difference from a plain ViT, or ''. Extra parts with weights show as extra tensors at load."""
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(model) is not VisionTransformer or any(type(block) is not Block for block in model.blocks):
        return f"class {type(model).__name__}"
    attention, patch = model.blocks[0].attn, model.patch_embed.patch_size
    if model.global_pool not in POOLS or (model.pool_include_prefix and model.global_pool == "avg"):
        return f"global_pool {model.global_pool!r}, pool_include_prefix {model.pool_include_prefix}"
    if attention.proj.bias is None:
        return "proj_bias False"
    if not all(isinstance(m, nn.LayerNorm) for m in (model.blocks[0].norm1, model.blocks[0].norm2)):
        return f"norm {type(model.blocks[0].norm1).__name__}"
    if type(model.blocks[0].mlp).__name__ != "Mlp" or type(attention).__name__ != "Attention":
        return f"{type(model.blocks[0].mlp).__name__}, {type(attention).__name__}"
    final = isinstance(model.norm, nn.LayerNorm) or isinstance(model.fc_norm, nn.LayerNorm)
    if model.pos_embed is None or patch[0] != patch[1] or not final or model.in_chans != 3:
        return f"positions, patch {patch}, final norm {final} or {model.in_chans} channels"
    return ""


def vit_config(model: nn.Module) -> ViTConfig:
    """Configuration of a timm model."""
    block, pool = model.blocks[0], POOLS[model.global_pool]
    late = isinstance(model.fc_norm, nn.LayerNorm)
    stack = transformer(
        model.embed_dim, len(model.blocks), block.attn.num_heads, block.mlp.fc1.out_features,
        activation=_activation(block.mlp.act), norm_eps=block.norm1.eps,
        layer_scale=type(block.ls1).__name__ == "LayerScale", final_norm=not late,
    )  # fmt: skip
    attention = replace(stack.block.attention, qkv_bias=block.attn.qkv.bias is not None)
    stack = replace(stack, block=replace(stack.block, attention=attention))
    return ViTConfig(
        tuple(model.patch_embed.img_size), model.patch_embed.patch_size[0], stack, pool, model.has_class_token,
        model.num_reg_tokens, not model.no_embed_class, model.patch_embed.proj.bias is not None,
        isinstance(model.norm_pre, nn.LayerNorm), late, classes=model.num_classes,
        map_prefix=model.pool_include_prefix,
    )  # fmt: skip


def _activation(module: nn.Module) -> str:
    name = type(module).__name__ + ("Tanh" if getattr(module, "approximate", "none") == "tanh" else "")
    known = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu", "SiLU": "silu"}
    if name not in known:
        raise CheckpointError(f"timm's activation {name} is not supported")
    return known[name]
