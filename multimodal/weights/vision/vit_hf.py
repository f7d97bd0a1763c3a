"""Vision transformers in transformers' names: ViT, DeiT, DINOv2 with or without registers, DINOv3 and BEiT.

Traps: the maps of attention are apart, and their output lies beside them; DINOv2's positions are resampled without
antialiasing, with registers they are antialiased; its classifiers read the class token beside the mean of the patches;
BEiT pools the patches and norms their mean, with its pooler alone; DeiT's classifiers have a head for each of two
tokens, or for one. Tokens that mask patches in training have no use here, and are not kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.blocks.positions import GridRotary
from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.vit import ViT, ViTConfig
from multimodal.weights.family import Family, activation
from multimodal.weights.table import HALVES, NO_FIRST, NameRow, Tensors, linears, under, weight_and_bias
from multimodal.weights.text.bert import class_names
from multimodal.weights.vision.image_processor import preprocessing
from multimodal.weights.vision.open_clip import pair

COMMON = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
          "hidden_act": "gelu", "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3,
          "qkv_bias": True}  # fmt: skip
POOLER = {"pooler_act": "tanh", "pooler_output_size": None}
DINO = COMMON | {"layer_norm_eps": 1e-6, "mlp_ratio": 4, "patch_size": 14, "use_swiglu_ffn": False}
BEIT = COMMON | {"use_absolute_position_embeddings": False, "use_relative_position_bias": False,
                 "use_shared_relative_position_bias": False, "use_mean_pooling": True,
                 "layer_scale_init_value": 0.1}  # fmt: skip
DINOV3 = COMMON | {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "layer_norm_eps": 1e-5,
                   "rope_theta": 100.0, "query_bias": True, "key_bias": False, "value_bias": True, "proj_bias": True,
                   "mlp_bias": True, "use_gated_mlp": False, "num_register_tokens": 0}  # fmt: skip

LAYER = {f"attention.attention.{part}": f"attention.{part}" for part in ("query", "key", "value")} | {
    "attention.output.dense": "attention.out", "intermediate.dense": "feed.up", "output.dense": "feed.down",
    "layernorm_before": "attention_branch.norm", "layernorm_after": "feed_branch.norm",
}  # fmt: skip
DINO_LAYER = {name: ours for name, ours in LAYER.items() if name.startswith("attention.")} | {
    "norm1": "attention_branch.norm", "norm2": "feed_branch.norm", "mlp.fc1": "feed.up", "mlp.fc2": "feed.down",
}  # fmt: skip
DINOV3_LAYER = {f"attention.{part[0]}_proj": f"attention.{part}" for part in ("query", "key", "value", "out")} | {
    "norm1": "attention_branch.norm", "norm2": "feed_branch.norm",
    "mlp.gate_proj": "feed.gate", "mlp.up_proj": "feed.up", "mlp.down_proj": "feed.down",
}  # fmt: skip


class ViTSpec(NamedTuple):
    """`type`: of its configurations, and prefix of a classifier's names. `names`: of a layer's maps and norms; parts
    that a model lacks have no row. `scales`: of a layer's two branches. `ends`: names outside of the layers.
    `config_from`: changes of a plain tower. `only`: options of which only these values are supported. `processor`: see
    `preprocessing`."""

    type: str
    defaults: dict[str, Any]
    names: dict[str, str]
    config_from: Callable[[ViTConfig, dict[str, Any], Tensors], ViTConfig] = lambda made, config, tensors: made
    scales: tuple[str, str] = ("layer_scale1.lambda1", "layer_scale2.lambda1")
    ends: dict[str, str] = {"embeddings.patch_embeddings.projection": "embed", "layernorm": "stack.norm"}  # noqa: RUF012
    layer: str = "encoder.layer.{}."
    only: dict[str, Any] = {}  # noqa: RUF012
    processor: str = "Bit"


def config_of(spec: ViTSpec, config: dict[str, Any], tensors: Tensors) -> ViTConfig:
    """Raises CheckpointError for unsupported options, by name and value."""
    for name, value in spec.only.items():
        if config[name] != value:
            raise CheckpointError(f"config.json: {name} {config[name]!r} is not supported")
    image, patch = pair(config["image_size"]), pair(config["patch_size"])
    if patch[0] != patch[1] or config["num_channels"] != 3:
        raise CheckpointError(f"config.json: patch_size {patch} with num_channels {config['num_channels']}")
    hidden = config["hidden_size"] * config["mlp_ratio"] if "mlp_ratio" in config else config["intermediate_size"]
    stack = transformer(
        config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"], hidden,
        activation=activation(config, "hidden_act"), norm_eps=config["layer_norm_eps"],
    )  # fmt: skip
    head = next((tensors[name] for name in ("classifier.weight", "cls_classifier.weight") if name in tensors), ())
    if f"{spec.type}.embeddings.cls_token" in tensors and not len(head):
        raise CheckpointError(f"architectures {config.get('architectures')}: expected a classifier or a model alone")
    pooler = "pooler.dense.weight" in tensors
    if len(head):
        check_problem(config)
    if pooler and config["pooler_output_size"] not in (None, config["hidden_size"]):
        raise CheckpointError(f"config.json: pooler_output_size {config['pooler_output_size']} is not supported")
    made = ViTConfig(
        tuple(image), patch[0], stack, "token", True, classes=len(head), position_offset=0.0,
        pool_map=activation(config, "pooler_act") if pooler else None,
    )  # fmt: skip
    made = _block(made, {"qkv_bias": bool(config["qkv_bias"])})
    return spec.config_from(made, config, tensors)


def _deit(made: ViTConfig, config: dict[str, Any], tensors: Tensors) -> ViTConfig:
    return replace(made, registers=1, pool="pair" if "cls_classifier.weight" in tensors else "token")


def _block(made: ViTConfig, attention: dict[str, Any] | None = None, **changes: Any) -> ViTConfig:
    block = made.stack.block
    block = replace(block, attention=replace(block.attention, **attention or {}), **changes)
    return replace(made, stack=replace(made.stack, block=block))


def _dino(made: ViTConfig, config: dict[str, Any], tensors: Tensors, registers: bool = False) -> ViTConfig:
    if config["use_swiglu_ffn"]:
        wide = int(made.stack.block.hidden * 2 / 3)
        made = _block(made, hidden=(wide + 7) // 8 * 8, gated=True, activation="silu")
    count, offset = (config["num_register_tokens"], None) if registers else (0, 0.0)
    made = replace(_block(made, layer_scale=True), pool="both" if made.classes else "token")
    return replace(made, registers=count, positions_on_registers=False, position_offset=offset)


def _dinov3(made: ViTConfig, config: dict[str, Any], tensors: Tensors) -> ViTConfig:
    query, key, value, out, feed = (config[f"{name}_bias"] for name in ("query", "key", "value", "proj", "mlp"))
    if query != value or (key and not query) or not (out and feed):
        raise CheckpointError(
            f"config.json: query_bias {query}, key_bias {key}, value_bias {value}, proj_bias {out}, mlp_bias {feed} "
            "together are not supported"
        )
    attention = {"qkv_bias": bool(query), "key_bias": bool(key)}
    made = _block(made, attention, gated=bool(config["use_gated_mlp"]), layer_scale=True)
    return replace(
        made, positions=False, registers=config["num_register_tokens"], rotary=GridRotary(config["rope_theta"], True)
    )


def _beit(made: ViTConfig, config: dict[str, Any], tensors: Tensors) -> ViTConfig:
    late, norm = bool(config["use_mean_pooling"]), "pooler.layernorm.weight"
    grid = made.grid if config["use_relative_position_bias"] else None
    made = _block(made, {"key_bias": False, "grid": grid}, layer_scale=config["layer_scale_init_value"] > 0)
    return replace(
        made, pool="mean" if late else "token", norm_after_pool=late and (made.classes > 0 or norm in tensors),
        stack=replace(made.stack, final_norm=not late), positions=bool(config["use_absolute_position_embeddings"]),
    )  # fmt: skip


def rows_of(spec: ViTSpec, config: ViTConfig) -> list[NameRow]:
    attention = config.stack.block.attention
    absent = [f"attention.{part}.bias" for part in ("query", "key", "value") if not attention.qkv_bias]
    absent += [] if attention.key_bias else ["attention.key.bias"]
    maps = [row for row in linears(spec.names) if row.targets[0] not in absent]
    if "mlp.gate_proj" in spec.names and not config.stack.block.gated:
        maps = [row for row in maps if "gate" not in row.foreign]
    if "mlp.fc1" in spec.names and config.stack.block.gated:  # DINOv2's gate and map in one
        maps = [row for row in maps if not row.foreign.startswith("mlp.")]
        maps += [*weight_and_bias("mlp.weights_in", ("feed.gate", "feed.up"), HALVES),
                 *weight_and_bias("mlp.weights_out", "feed.down")]  # fmt: skip
    if config.stack.block.layer_scale:
        maps += [NameRow(name, f"{part}_branch.scale.gain") for name, part in
                 zip(spec.scales, ("attention", "feed"), strict=True)]  # fmt: skip
    if attention.grid is not None:
        table = "attention.attention.relative_position_bias.relative_position_bias_table"
        index = table.replace("_table", "_index")  # older files hold it
        maps.append(NameRow(table, "attention.relative.table"))
        maps.append(NameRow(index, reason="follows from the grid", optional=True))
    made = [*linears({name: ours for name, ours in spec.ends.items() if config.stack.final_norm or ours == "embed"}),
            NameRow("embeddings.cls_token", "class_token", NO_FIRST),
            NameRow("embeddings.mask_token", reason="masks patches in training", optional=True)]  # fmt: skip
    made += under(spec.layer, "stack.blocks.{}.", [row for row in maps if not row.reason])
    made += [replace(row, foreign=spec.layer + row.foreign) for row in maps if row.reason]
    made += [NameRow("embeddings.position_embeddings", "positions", NO_FIRST)] if config.positions else []
    name = "distillation_token" if spec.type == "deit" else "register_tokens"
    empty = NameRow(f"embeddings.{name}", reason="holds none", optional=True)
    made.append(NameRow(f"embeddings.{name}", "registers", NO_FIRST) if config.registers else empty)
    made += weight_and_bias("pooler.layernorm", "norm") if config.norm_after_pool else []
    made += weight_and_bias("pooler.dense", "pool_map") if config.pool_map else []
    if not config.classes:
        return made
    heads = {"cls_classifier": "head", "distillation_classifier": "distilled_head"}
    made = [replace(row, foreign=f"{spec.type}.{row.foreign}") for row in made]
    return made + linears(heads if config.pool == "pair" else {"classifier": "head"})


def _card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Names of the classes, for which numbers stand where a name is given twice, as in ImageNet, and the scores of
    transformers' pipeline."""
    names = class_names(config)
    labels = names if len({*names}) == len(names) else [*map(str, range(len(names)))]
    return {"labels": labels, "names": names} | head_scores(config, len(names))


def head_scores(config: dict[str, Any], classes: int) -> dict[str, Any]:
    """Card's fact of the scores that transformers' pipeline gives."""
    several = config.get("problem_type") == "multi_label_classification" or classes == 1
    return {"scores": "sigmoid"} if several else {}


def check_problem(config: dict[str, Any]) -> None:
    """Raise CheckpointError for a head whose outputs are numbers."""
    if config.get("problem_type") == "regression":
        raise CheckpointError("config.json: problem_type 'regression' is not supported: its outputs are no classes")


def _family(spec: ViTSpec) -> Family:
    token = "embeddings.cls_token"
    return Family(
        f"{spec.type}-hf", ViT, (), partial(config_of, spec), partial(rows_of, spec),
        preprocessing=partial(preprocessing, processor=spec.processor), card=_card, needs="config.json",
        defaults=spec.defaults, types=(spec.type,), one_size=spec.type in ("vit", "deit"),
        only=lambda tensors: token in tensors or f"{spec.type}.{token}" in tensors,
    )  # fmt: skip


VIT_HF = _family(ViTSpec("vit", COMMON | POOLER, LAYER, processor="ViT"))
DEIT_HF = _family(ViTSpec("deit", COMMON | POOLER, LAYER, _deit, processor="DeiT"))
DINOV2_HF = _family(ViTSpec("dinov2", DINO, DINO_LAYER, _dino))
DINOV2_REGISTERS_HF = _family(
    ViTSpec("dinov2_with_registers", DINO | {"num_register_tokens": 4}, DINO_LAYER, partial(_dino, registers=True))
)
DINOV3_HF = _family(ViTSpec(
    "dinov3_vit", DINOV3, DINOV3_LAYER, _dinov3, layer="layer.{}.",
    ends={"embeddings.patch_embeddings": "embed", "norm": "stack.norm"}, processor="DINOv3ViT",
))  # fmt: skip
BEIT_HF = _family(ViTSpec(
    "beit", BEIT, LAYER, _beit, scales=("lambda_1", "lambda_2"), processor="Beit",
    only={"use_shared_relative_position_bias": False},
))  # fmt: skip
