"""timm's VisionTransformer, Eva and Beit in timm's names (timm/models/vision_transformer.py, eva.py, beit.py).

Traps: epsilon is 1e-6 in timm's own models and 1e-5 in CLIP's; the last norm follows mean pooling (`fc_norm`);
positions may omit the class token and registers (`no_embed_class`); grids need not be square."""

import json
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import CheckpointError
from multimodal.models.vit import ViT, ViTConfig
from multimodal.system.files import shown
from multimodal.tokens.image.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from multimodal.weights.family import Family
from multimodal.weights.folder import LEAST_TENSORS, MOST_LAYERS, build
from multimodal.weights.table import HALVES, NO_FIRST, THIRDS, NameRow, Tensors, linears, qkv, under, weight_and_bias
from multimodal.weights.vision.image_processor import per_channel
from multimodal.weights.vision.timm_model import timm_model, vit_config
from multimodal.weights.vision.vit_hf import check_problem, head_scores

# timm's defaults (data/config.py)
PIXELS = {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.875, "crop_mode": "center",
          "mean": IMAGENET_MEAN, "std": IMAGENET_STD}  # fmt: skip


def config_from(config: dict[str, Any], tensors: Tensors) -> ViTConfig:
    if not config:
        raise CheckpointError(
            "timm weights without config.json: give their architecture, such as architecture='vit_base_patch16_224', "
            "since the weights do not state the number of heads"
        )
    classes = config.get("num_classes")
    if classes is None:
        classes = len(tensors["head.weight"]) if "head.weight" in tensors else 0
    options = {"num_classes": classes, **(config.get("model_args") or {})}
    if config.get("pretrained_cfg") or "fixed_input_size" in config:  # gives the image size too
        options["pretrained_cfg"] = {**_pretrained(config), "num_classes": options["num_classes"]}
    if isinstance(depth := options.get("depth"), int) and depth > min(MOST_LAYERS, len(tensors) // LEAST_TENSORS):
        raise CheckpointError(f"config.json: depth {depth}, more than the {len(tensors)} tensors of the file can fill")
    model = timm_model(config["architecture"], **options)
    if (stated := config.get("global_pool") or model.global_pool) != model.global_pool:
        raise CheckpointError(f"config.json: global_pool {stated!r}, where the architecture has {model.global_pool!r}")
    made, size = vit_config(model), _pixels(config).get("input_size", [])[1:]
    if getattr(model.patch_embed, "strict_img_size", False) and size and tuple(size) != made.image:
        raise CheckpointError(f"config.json: input_size {size}, where the architecture takes {made.image} alone")
    return made


def _complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """transformers' TimmWrapperModel has no head, whatever its configuration says."""
    headless = config.get("model_type") == "timm_wrapper" and "head.weight" not in tensors
    return config | {"num_classes": 0} if headless else config


def _pretrained(config: dict[str, Any]) -> dict[str, Any]:
    """`pretrained_cfg`; older files state its keys beside the architecture."""
    record = config.get("pretrained_cfg")
    record = record or {key: config[key] for key in (*PIXELS, "fixed_input_size") if key in config}
    args = config.get("model_args") or {}
    side = args.get("img_size")
    if side and record.get("fixed_input_size") and not args.get("dynamic_img_size"):
        # older files keep the size of the model that was fine-tuned
        record = record | {"input_size": [3, *((side, side) if isinstance(side, int) else side)]}
    return record


class TimmNames(NamedTuple):
    """Names that timm's classes give one part: maps of attention `apart`, a gate `apart` from its map, and layer scale
    as `gamma`, not `ls`."""

    apart: bool = False
    gates: bool = False
    gamma: bool = False

    def fits(self, tensors: Tensors, prefix: str = "") -> bool:
        first = f"{prefix}blocks.0."
        return self == (f"{first}attn.q_proj.weight" in tensors, f"{first}mlp.fc1_g.weight" in tensors,
                        f"{first}gamma_1" in tensors)  # fmt: skip


# ViT, PE-Core, EVA · BEiT, DINOv3, PE-Lang · DINOv3's gated · EVA-02
LAYOUTS = {"": TimmNames(), "-gamma": TimmNames(gamma=True), "-gates": TimmNames(gates=True, gamma=True),
           "-apart": TimmNames(apart=True, gates=True)}  # fmt: skip


def rows(config: ViTConfig, layout: TimmNames = LAYOUTS[""]) -> list[NameRow]:
    own = config.stack.block.attention
    block = [*linears({"attn.proj": "attention.out", "mlp.fc2": "feed.down", "mlp.norm": "feed.norm",
                       "attn.norm": "attention.inner_norm", "attn.q_norm": "attention.query_norm",
                       "attn.k_norm": "attention.key_norm"})]  # fmt: skip
    norm = "out_norm" if config.stack.block.out_norm else "norm"
    block += linears({"norm1": f"attention_branch.{norm}", "norm2": f"feed_branch.{norm}"})
    if layout.apart:
        block += linears({f"attn.{part[0]}_proj": f"attention.{part}" for part in ("query", "key", "value")})
    else:
        fused = weight_and_bias("attn.qkv", qkv("attention"), THIRDS)
        apart = [NameRow(f"attn.{part[0]}_bias", f"attention.{part}.bias") for part in ("query", "value")]
        block += fused if own.key_bias else [fused[0], *apart]
    if layout.gates:
        block += linears({"mlp.fc1_g": "feed.gate", "mlp.fc1_x": "feed.up"})
    elif config.stack.block.gated:
        block += weight_and_bias("mlp.fc1", ("feed.gate", "feed.up"), HALVES)
    else:
        block += weight_and_bias("mlp.fc1", "feed.up")
    scales = ("gamma_1", "gamma_2") if layout.gamma else ("ls1.gamma", "ls2.gamma")
    block += [
        NameRow(name, f"{part}_branch.scale.gain") for name, part in zip(scales, ("attention", "feed"), strict=True)
    ]
    block.append(NameRow("attn.relative_position_bias_table", "attention.relative.table"))
    made = [
        *under("blocks.{}.", "stack.blocks.{}.", block), *weight_and_bias("norm", "stack.norm"),
        *linears({"fc_norm": "norm", "patch_embed.proj": "embed", "norm_pre": "stem_norm", "head": "head",
                  "head_dist": "distilled_head"}),
        NameRow("pos_embed", "positions", NO_FIRST), NameRow("cls_token", "class_token", NO_FIRST),
        NameRow("dist_token" if config.pool == "pair" else "reg_token", "registers", NO_FIRST), *_map_pool_rows(),
    ]  # fmt: skip
    if config.conv_stem:
        made = [row for row in made if "patch_embed" not in row.foreign] + _stem_rows()
    names = names_of(config)
    index = NameRow("blocks.{}.attn.relative_position_index", reason="follows from the grid", optional=True)
    return [row for row in made if set(row.targets) <= names] + ([index] if own.grid else [])


def names_of(config: ViTConfig) -> frozenset[str]:
    """Names of the model's tensors with `{}` for the layer; one layer has them all."""
    short = replace(config, stack=replace(config.stack, layers=1))
    return frozenset(re.sub(r"blocks\.\d+\.", "blocks.{}.", name) for name in build(ViT, short).state_dict())


def _stem_rows() -> list[NameRow]:
    """MobileCLIP-B's three convolutions, the last of which is our map of the patches."""
    kinds = {"conv": ("weight",), "norm": ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    names = {"conv": "conv", "norm": "bn"}
    made = [NameRow(f"{part}.{names[kind]}.{name}", f"conv_stem.{2 * part}.{kind}.{name}")
            for part in range(2) for kind, own in kinds.items() for name in own]  # fmt: skip
    return under("patch_embed.backbone.", "", [*made, *weight_and_bias("2.conv", "embed")])


def _map_pool_rows() -> list[NameRow]:
    linear = {"q": "attention.query", "proj": "attention.out", "norm": "norm", "mlp.fc1": "feed.up",
              "mlp.fc2": "feed.down"}  # fmt: skip
    fused = weight_and_bias("kv", ("attention.key", "attention.value"), HALVES)
    return under("attn_pool.", "pool.", [*linears(linear), *fused, NameRow("latent", "query")])


def _pixels(config: dict[str, Any]) -> dict[str, Any]:
    """The stated or registered record over timm's defaults; {} without one."""
    record = _pretrained(config) or _registered(config.get("architecture", ""))
    # null is the default in timm, and 0
    return PIXELS | {key: value for key, value in record.items() if value} if record else {}


def preprocessing(folder: Path | None, config: dict[str, Any]) -> Preprocessing | None:
    """From `pretrained_cfg`, or timm's for a tagged architecture ("vit_tiny_patch16_224.augreg_in1k")."""
    if not (record := _pixels(config)):
        return None
    modes = {"center": "shortest", "squash": "squash"}
    if record["crop_mode"] not in modes:
        raise CheckpointError(f"config.json: crop_mode {shown(record['crop_mode'])} is not supported")
    mean, std = (per_channel(record[key], f"config.json: {key}") for key in ("mean", "std"))
    return Preprocessing(tuple(record["input_size"][1:]), modes[record["crop_mode"]], record["interpolation"], mean,
                         std, 0, float(record["crop_pct"]))  # fmt: skip


def _registered(architecture: str) -> dict[str, Any]:
    if "." not in architecture:
        return {}  # without a tag the preprocessing is ambiguous
    import timm

    pretrained = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
    return json.loads(json.dumps(pretrained.to_dict())) if pretrained else {}


def _card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """timm's names of the classes, with their descriptions; without names LABEL_0 …, as in transformers, whose
    TimmWrapper also states what its scores are."""
    stated = config.get("pretrained_cfg") or {}
    told, described = (config.get(key) or stated.get(key) or {} for key in ("label_names", "label_descriptions"))
    told = told or config.get("labels")  # older files
    classes = config.get("num_classes", stated.get("num_classes"))
    if classes == 0:
        return {}
    check_problem(config)
    names: Any = [f"LABEL_{number}" for number in range(classes or 0)]
    if isinstance(told, dict) and told.keys() <= {*map(str, range(classes or len(told)))}:  # timm lists some alone
        names = [told.get(str(number), f"LABEL_{number}") for number in range(classes or len(told))]
    elif told:
        names = told
    if not isinstance(names, list) or not all(isinstance(name, str | int) and name != "" for name in names):
        expected = f"{classes or 'the'} names, or a name for each number from 0 on"
        raise CheckpointError(f"config.json: label_names: expected {expected} (got {shown(told)})")
    if classes and len(names) != classes:  # timm loads them
        warnings.warn(f"config.json: label_names: {len(names)} for {classes} classes; they are ignored", stacklevel=2)
        names, described = [f"LABEL_{number}" for number in range(classes)], {}
    if not isinstance(described, dict):
        raise CheckpointError(
            f"config.json: label_descriptions: expected an object from name to text (got {shown(described)})"
        )
    if not names:
        return {}
    names = [str(name) for name in names]
    labels = names if len({*names}) == len(names) else [*map(str, range(len(names)))]
    texts = [str(described.get(name) or name) for name in names]
    return {"labels": labels, "names": texts} | head_scores(config, len(names))


FAMILIES = tuple(
    Family(
        f"timm{name}", ViT, ("patch_embed.proj.weight", "blocks.0.norm1.weight"), config_from,
        partial(rows, layout=layout), preprocessing=preprocessing, complete=_complete, card=_card, only=layout.fits,
    )
    for name, layout in LAYOUTS.items()
)  # fmt: skip
FAMILY = FAMILIES[0]
