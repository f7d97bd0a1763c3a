"""CLIP in OpenAI's names, which OpenCLIP kept (Radford et al. 2021; open_clip/model.py).

Traps: OpenAI's weights use quick-GELU, most of OpenCLIP's the exact one, and no tensor tells. Projections are stored as
x @ W. A ViT has a norm before its blocks; a ModifiedResNet's
attention pool projects. Text is pooled at the highest id of a row, the end of text.
OpenCLIP's CustomTextCLIP has the same text tower under `text.`."""

from functools import partial
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.vision.resnet import ResNetConfig
from multimodal.models.vit import ViTConfig
from multimodal.weights.family import Family
from multimodal.weights.table import (
    ANY_SCALAR,
    FIRST,
    TRANSPOSE,
    NameRow,
    Tensors,
    in_proj,
    linears,
    under,
    weight_and_bias,
)
from multimodal.weights.vision import conv_towers
from multimodal.weights.vision.open_clip import (
    VISION,
    model_settings,
    open_clip_preprocessing,
    open_clip_tokenizer,
    pair,
    settings,
    text_part,
    tower,
    unsupported,
)

RESNET = "visual.layer1.0.conv1.weight"
ARCHIVE = ("input_resolution", "context_length", "vocab_size")  # only in OpenAI's archives


def vision_part(model: dict[str, Any]) -> ViTConfig:
    """The image tower, if it is a ViT. Raises CheckpointError for other pools and patches."""
    part = settings(model["vision_cfg"], VISION, "vision_cfg.")
    image, patch = pair(part["image_size"]), pair(part["patch_size"])
    pools = {"tok": "token", "avg": "mean"}
    if part["pool_type"] not in pools:
        raise unsupported("vision_cfg.pool_type", part["pool_type"])
    if patch[0] != patch[1]:
        raise unsupported("vision_cfg.patch_size", list(patch))
    late = bool(part["final_ln_after_pool"])
    stack = tower(part, part["width"] // part["head_width"], bool(model["quick_gelu"]), final_norm=not late)
    return ViTConfig(
        image, patch[0], stack, pools[part["pool_type"]], class_token=True, patch_bias=False,
        stem_norm=not part["no_ln_pre"], norm_after_pool=late,
    )  # fmt: skip


def resnet_part(model: dict[str, Any]) -> ResNetConfig:
    """The image tower, if it is a ModifiedResNet. Raises CheckpointError for one of other than four stages."""
    part = settings(model["vision_cfg"], VISION, "vision_cfg.")
    layers, width = part["layers"], part["width"]
    if not isinstance(layers, list) or len(layers) != 4:
        raise CheckpointError(f"OpenCLIP configuration: vision_cfg.layers {layers!r}, where the file has a ResNet")
    heads = width * 32 // part["head_width"]
    return ResNetConfig(pair(part["image_size"]), tuple(layers), width, heads, model["embed_dim"])


def config_from(config: dict[str, Any], tensors: Tensors) -> CLIPConfig:
    model, resnet = model_settings(config), RESNET in tensors
    if isinstance(layers := model["vision_cfg"].get("layers"), list) and not resnet:
        raise CheckpointError(f"OpenCLIP configuration: vision_cfg.layers {layers}, where the file has a ViT")
    text, fields = text_part(model)
    loss = "softmax" if model["init_logit_bias"] is None else "sigmoid"
    image = resnet_part(model) if resnet else vision_part(model)
    return CLIPConfig(image, text, model["embed_dim"], loss, image_project=not resnet, **fields)


def archive_config(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Configuration that OpenAI's loader infers from an archive: heads 64 wide and quick-GELU (clip/model.py,
    build_model), images resized and cropped as in clip/clip.py, _transform."""
    resnet = RESNET in tensors
    if not all(name in tensors for name in (RESNET if resnet else "visual.class_embedding", *ARCHIVE)):
        return config
    if config:
        if not config.get("model_cfg", config).get("quick_gelu"):
            raise CheckpointError(
                "OpenAI's weights were trained with quick-GELU, which this architecture lacks (omit it, or add "
                "-quickgelu to its name)"
            )
        return config
    (context, text_width), vocabulary = tensors["positional_embedding"].shape, len(tensors["token_embedding.weight"])
    vision = _archived_resnet(tensors) if resnet else _archived_vit(tensors)
    layers = _count(tensors, "transformer.", ".ln_1.weight")
    text = {"layers": layers, "width": text_width, "heads": text_width // 64, "context_length": context,
            "vocab_size": vocabulary}  # fmt: skip
    model = {"embed_dim": tensors["text_projection"].shape[1], "quick_gelu": True, "vision_cfg": vision,
             "text_cfg": text}  # fmt: skip
    return {"model_cfg": model, "preprocess_cfg": {"size": vision["image_size"]}}


def _count(tensors: Tensors, prefix: str, suffix: str) -> int:
    return sum(name.startswith(prefix) and name.endswith(suffix) for name in tensors)


def _archived_vit(tensors: Tensors) -> dict[str, Any]:
    width, _, _, patch = tensors["visual.conv1.weight"].shape
    side = round((len(tensors["visual.positional_embedding"]) - 1) ** 0.5)
    layers = _count(tensors, "visual.", ".ln_1.weight")
    return {"layers": layers, "width": width, "patch_size": patch, "image_size": side * patch}


def _archived_resnet(tensors: Tensors) -> dict[str, Any]:
    side = round((len(tensors["visual.attnpool.positional_embedding"]) - 1) ** 0.5)
    layers = [_count(tensors, f"visual.layer{stage}.", ".conv1.weight") for stage in range(1, 5)]
    return {"layers": layers, "width": len(tensors[RESNET]), "patch_size": None, "image_size": 32 * side}


def block_rows(
    layer_scale: bool, foreign: str = "transformer.resblocks.{}.", ours: str = "stack.blocks.{}.",
    attention: str = "attention", feed: str = "feed",
) -> list[NameRow]:  # fmt: skip
    """Rows of a residual block, which may be part of one of ours; `attention` and `feed`: names there."""
    rows = [
        *in_proj("attn", attention),
        *linears({"attn.out_proj": f"{attention}.out", "ln_1": f"{attention}_branch.norm"}),
        *linears({"ln_2": f"{feed}_branch.norm", "mlp.c_fc": f"{feed}.up", "mlp.c_proj": f"{feed}.down"}),
    ]
    if layer_scale:
        rows += [NameRow(f"ls_{i}.gamma", f"{part}_branch.scale.gain") for i, part in ((1, attention), (2, feed))]
    return under(foreign, ours, rows)


def text_rows(config: CLIPConfig, prefix: str) -> list[NameRow]:
    """Rows of the text tower, its projection and the two scalars."""
    names = [
        NameRow("token_embedding.weight", "embed.weight"),
        NameRow("positional_embedding", "positions"),
        *weight_and_bias("ln_final", "stack.norm"),
        *block_rows(config.text.stack.block.layer_scale),
    ]
    rows = under(prefix, "text.", names)
    if config.text_project and config.text_bias:
        rows += weight_and_bias(f"{prefix}text_projection", "text_project")
    elif config.text_project:
        rows.append(NameRow(f"{prefix}text_projection", "text_project.weight", TRANSPOSE))
    scalars = ["logit_scale"] + ["logit_bias"] * (config.loss == "sigmoid")
    return rows + [NameRow(name, name, ANY_SCALAR) for name in scalars]


def vision_rows(config: ViTConfig) -> list[NameRow]:
    rows = [
        NameRow("conv1.weight", "embed.weight"),
        NameRow("class_embedding", "class_token", FIRST),
        NameRow("positional_embedding", "positions"),
        *weight_and_bias("ln_post", "norm" if config.norm_after_pool else "stack.norm"),
        *block_rows(config.stack.block.layer_scale),
    ]
    return rows + (weight_and_bias("ln_pre", "stem_norm") if config.stem_norm else [])


def _rows(prefix: str, config: CLIPConfig) -> list[NameRow]:
    dropped = [NameRow(name, reason="follows from the shapes", optional=True) for name in ARCHIVE]
    resnet = isinstance(config.image, ResNetConfig)
    image = conv_towers.rows(config.image) if resnet else vision_rows(config.image)
    project = [] if resnet else [NameRow("visual.proj", "image_project.weight", TRANSPOSE)]
    return [*under("visual.", "image.", image), *project, *text_rows(config, prefix), *dropped]


def _family(name: str, prefix: str, resnet: bool = False) -> Family:
    own = RESNET if resnet else "visual.class_embedding"
    return Family(
        name, CLIP, ("visual.conv1.weight", own, f"{prefix}token_embedding.weight"), config_from,
        rows=partial(_rows, prefix), tokenizer=open_clip_tokenizer, preprocessing=open_clip_preprocessing,
        complete=archive_config, lacks=("text_decoder.text_projection",),  # CoCa's
    )  # fmt: skip


FAMILY = _family("open_clip", "")
CUSTOM_TEXT = _family("open_clip-custom-text", "text.")
RESNETS = (
    _family("open_clip-resnet", "", resnet=True),
    _family("open_clip-resnet-custom-text", "text.", resnet=True),
)
