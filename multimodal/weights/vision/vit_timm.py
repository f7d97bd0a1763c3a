"""timm's VisionTransformer in timm's names (timm/models/vision_transformer.py).

Traps: epsilon is 1e-6 in timm's own models and 1e-5 in CLIP's; the last norm follows mean pooling (`fc_norm`);
positions may omit the class token and registers (`no_embed_class`); grids need not be square."""

import json
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.vit import ViT, ViTConfig
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.family import Family
from multimodal.weights.folder import LEAST_TENSORS, MOST_LAYERS
from multimodal.weights.table import HALVES, NO_FIRST, THIRDS, NameRow, Tensors, linears, qkv, under, weight_and_bias
from multimodal.weights.vision.timm_model import timm_model, vit_config


def config_from(config: dict[str, Any], tensors: Tensors) -> ViTConfig:
    if not config:
        raise CheckpointError(
            "timm weights without config.json: give architecture=, since the weights do not state the number of heads"
        )
    classes = len(tensors["head.weight"]) if "head.weight" in tensors else 0
    options = {"num_classes": config.get("num_classes", classes), **config.get("model_args", {})}
    if pretrained := config.get("pretrained_cfg"):  # gives the image size too
        options["pretrained_cfg"] = {**pretrained, "num_classes": options["num_classes"]}
    if isinstance(depth := options.get("depth"), int) and depth > min(MOST_LAYERS, len(tensors) // LEAST_TENSORS):
        raise CheckpointError(f"config.json: depth {depth}, more than the {len(tensors)} tensors of the file can fill")
    model = timm_model(config["architecture"], **options)
    if (stated := config.get("global_pool", model.global_pool)) != model.global_pool:
        raise CheckpointError(f"config.json: global_pool {stated!r}, where the architecture has {model.global_pool!r}")
    return vit_config(model)


def rows(config: ViTConfig) -> list[NameRow]:
    names = {
        "attn.proj": "attention.out", "norm1": "attention_branch.norm", "norm2": "feed_branch.norm",
        "mlp.fc1": "feed.up", "mlp.fc2": "feed.down",
    }  # fmt: skip
    fused = weight_and_bias("attn.qkv", qkv("attention"), THIRDS)[: 1 + config.stack.block.attention.qkv_bias]
    block = [*fused, *linears(names)]
    if config.stack.block.layer_scale:
        block += [NameRow("ls1.gamma", "attention_branch.scale.gain"), NameRow("ls2.gamma", "feed_branch.scale.gain")]
    late = config.norm_after_pool
    made = [
        *under("blocks.{}.", "stack.blocks.{}.", block),
        *weight_and_bias("fc_norm" if late else "norm", "norm" if late else "stack.norm"),
        NameRow("patch_embed.proj.weight", "embed.weight"),
        NameRow("pos_embed", "positions", NO_FIRST),
    ]
    made += [NameRow("patch_embed.proj.bias", "embed.bias")] if config.patch_bias else []
    made += [NameRow("cls_token", "class_token", NO_FIRST)] if config.class_token else []
    made += [NameRow("reg_token", "registers", NO_FIRST)] if config.registers else []
    made += weight_and_bias("norm_pre", "stem_norm") if config.stem_norm else []
    made += weight_and_bias("head", "head") if config.classes else []
    return made + (_map_pool_rows() if config.pool == "map" else [])


def _map_pool_rows() -> list[NameRow]:
    linear = {"q": "attention.query", "proj": "attention.out", "norm": "norm", "mlp.fc1": "feed.up",
              "mlp.fc2": "feed.down"}  # fmt: skip
    fused = weight_and_bias("kv", ("attention.key", "attention.value"), HALVES)
    return under("attn_pool.", "pool.", [*linears(linear), *fused, NameRow("latent", "query")])


def preprocessing(folder: Path | None, config: dict[str, Any]) -> Preprocessing | None:
    """From `pretrained_cfg`, or timm's for a tagged architecture ("vit_tiny_patch16_224.augreg_in1k")."""
    record = config.get("pretrained_cfg") or _registered(config.get("architecture", ""))
    if not record:
        return None
    modes = {"center": "shortest", "squash": "squash"}
    if record.get("crop_mode", "center") not in modes:
        raise CheckpointError(f"config.json: crop_mode {record['crop_mode']!r} is not supported")
    mean, std = (tuple(map(float, record[name])) for name in ("mean", "std"))
    resize = modes[record.get("crop_mode", "center")]
    return Preprocessing(tuple(record["input_size"][1:]), resize, record["interpolation"], mean, std, 0,
                         float(record["crop_pct"]))  # fmt: skip


def _registered(architecture: str) -> dict[str, Any]:
    if "." not in architecture:
        return {}  # without a tag the preprocessing is ambiguous
    import timm

    pretrained = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
    return json.loads(json.dumps(pretrained.to_dict())) if pretrained else {}


FAMILY = Family(
    "timm", ViT, ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight"), config_from, rows,
    preprocessing=preprocessing,
)  # fmt: skip
