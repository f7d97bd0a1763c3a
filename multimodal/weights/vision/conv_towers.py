"""Convolutional image towers of CLIP: OpenAI's ModifiedResNet, and timm's ConvNeXt and FastViT as OpenCLIP's trunks.

Ours have the same parts under other names, so each table renames the tensors of our own model."""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from multimodal.errors import CheckpointError
from multimodal.models.clip import TOWERS
from multimodal.models.vision.convnext import ConvNeXtConfig
from multimodal.models.vision.fastvit import LAYER_EPS, FastViTConfig
from multimodal.models.vision.resnet import ResNetConfig
from multimodal.models.vision.tower import ConvConfig
from multimodal.weights.folder import build
from multimodal.weights.table import THIRDS, NameRow, qkv

# a tensor of each trunk that no other has
TRUNKS = {"convnext": "stages.0.blocks.0.conv_dw.weight", "fastvit": "stem.0.conv_kxk.0.conv.weight"}
Renames = dict[str, str | Callable[[re.Match[str]], str]]


def _next(name: str) -> Callable[[re.Match[str]], str]:
    """Replacement with the number after the matched one."""
    return lambda match: name.format(int(match[1]) + 1)


RESNET: Renames = {
    r"^stem\.(\d)\.conv": _next("conv{}"), r"^stem\.(\d)\.norm": _next("bn{}"),
    r"^stages\.(\d)": _next("layer{}"),
    **{rf"{ours}\.{part}": f"{theirs}{number}" for number, ours in enumerate(("reduce", "mix", "expand"), 1)
       for part, theirs in (("conv", "conv"), ("norm", "bn"))},
    r"shortcut\.conv": "downsample.0", r"shortcut\.norm": "downsample.1",
    r"^pool\.positions": "attnpool.positional_embedding", r"^pool\.attention\.out": "attnpool.c_proj",
    r"^pool\.attention\.(.)\w+": r"attnpool.\1_proj",
}  # fmt: skip
CONVNEXT: Renames = {
    r"^norm": "head.norm", r"^stages\.(\d)\.": r"stages.\1.blocks.",
    r"^smaller\.(\d)": _next("stages.{}.downsample"), r"\.conv\.": ".conv_dw.", r"feed\.up": "mlp.fc1",
    r"feed\.down": "mlp.fc2", r"gain$": "gamma",
}  # fmt: skip
FASTVIT: Renames = {
    r"^(stem\.\d|last)\.conv\.": r"\1.conv_kxk.0.", r"(mixer|point)\.conv\.": r"\1.conv_kxk.0.",
    r"\.scale\.": ".conv_scale.", r"(conv_kxk\.0|conv_scale|large|small|mix)\.norm\.": r"\1.bn.",
    r"^last\.": "final_conv.", r"^squeeze": "final_conv.se", r"smaller\.squeeze": "smaller.proj.0.se",
    r"se\.down": "se.fc1", r"se\.up": "se.fc2", r"smaller\.(large|small)": r"smaller.proj.0.\1_conv",
    r"smaller\.point": "smaller.proj.1", "smaller": "downsample", r"positions\.": "pos_emb.pos_enc.",
    r"feed\.mix": "mlp.conv", r"feed\.up": "mlp.fc1", r"feed\.down": "mlp.fc2",
    r"(mixer\.|norm\.identity)": r"token_mixer.\1", r"attention\.out": "token_mixer.proj",
}  # fmt: skip
MIXING: Renames = {"mix_gain": "token_mixer.layer_scale.gamma", "feed_gain": "layer_scale.gamma"}
ATTENDING: Renames = {"mix_gain": "layer_scale_1.gamma", "feed_gain": "layer_scale_2.gamma"}


def rows(config: ConvConfig) -> list[NameRow]:
    """Rows of a tower's tensors."""
    names = {re.sub(r"^(stages\.\d+\.(?:blocks\.)?)\d+\.", r"\1{}.", name): None
             for name in build(TOWERS[type(config)], config).state_dict()}  # fmt: skip
    if isinstance(config, ResNetConfig):
        return [NameRow(_renamed(name, RESNET), name) for name in names]
    if isinstance(config, ConvNeXtConfig):
        return [NameRow(_renamed(name, CONVNEXT), name) for name in names]
    attends = {f"stages.{stage}.": on for stage, on in enumerate(config.attends)}
    made = [
        NameRow(_renamed(name, FASTVIT | (ATTENDING if attends.get(name[:9]) else MIXING)), name)
        for name in names if not re.search(r"attention\.(query|key|value)", name)
    ]  # fmt: skip
    blocks = [f"stages.{stage}.blocks.{{}}." for stage, on in enumerate(config.attends) if on]
    return made + [NameRow(f"{one}token_mixer.qkv.weight", tuple(f"{name}.weight" for name in qkv(f"{one}attention")),
                           THIRDS) for one in blocks]  # fmt: skip


def _renamed(name: str, renames: Renames) -> str:
    for pattern, new in renames.items():
        name = re.sub(pattern, new, name)
    return name


def trunk(model: nn.Module, name: str, pool: str, image: tuple[int, int]) -> ConvNeXtConfig | FastViTConfig:
    """Configuration of a timm model for images of a size. Raises CheckpointError for a part without tensors that
    differs; the others show at load."""
    kind = type(model).__name__
    if kind not in ("ConvNeXt", "FastVit") or pool not in ("", "avg"):
        raise CheckpointError(f"OpenCLIP configuration: trunk {name!r} ({kind}) with timm_pool {pool!r}")
    return _convnext(model, name, image) if kind == "ConvNeXt" else _fastvit(model, name, image)


def _convnext(model: Any, name: str, image: tuple[int, int]) -> ConvNeXtConfig:
    blocks = [stage.blocks for stage in model.stages]
    if len(blocks) != 4 or type(blocks[0][0].mlp.act).__name__ != "GELU" or blocks[0][0].use_conv_mlp:
        raise CheckpointError(f"timm's {name!r} is not a ConvNeXt of four stages with GELU")
    widths = tuple(one[0].conv_dw.out_channels for one in blocks)
    return ConvNeXtConfig(image, tuple(map(len, blocks)), widths, model.head.norm.eps)


def _fastvit(model: Any, name: str, image: tuple[int, int]) -> FastViTConfig:
    firsts, stages = [stage.blocks[0] for stage in model.stages], list(model.stages)[1:]
    attends = tuple(type(block).__name__ == "AttentionBlock" for block in firsts)
    norms = [block.norm for block, on in zip(firsts, attends, strict=True) if on]
    layer = bool(norms) and isinstance(norms[0], nn.LayerNorm)
    squeezes = (False, *(not isinstance(stage.downsample.proj[0].se, nn.Identity) for stage in stages))
    widths = tuple(block.mlp.fc1.in_channels for block in firsts)
    bare = any(type(stage.downsample.proj[0].act).__name__ != "GELU" for stage in stages)
    if bare or (layer and norms[0].eps != LAYER_EPS):
        raise CheckpointError(f"timm's {name!r} is not one of MobileCLIP's towers")
    return FastViTConfig(
        image, tuple(len(stage.blocks) for stage in model.stages), widths, firsts[0].mlp.fc1.out_channels // widths[0],
        attends, squeezes, "layer" if layer else "batch", model.stem[0].conv_scale is not None,
    )  # fmt: skip
