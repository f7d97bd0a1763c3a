"""torchaudio.models.Conformer: an encoder without a stem, over features as wide as the model.

The file has no configuration. Sizes come from shapes; `num_heads` and `convolution_first` leave no trace in the
weights and must be given, since a wrong value would run and be wrong."""

from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.errors import CheckpointError
from multimodal.models.speech import ConformerEncoder, ConformerEncoderConfig
from multimodal.weights.family import Family
from multimodal.weights.table import NO_LAST, THIRDS, Row, Tensors, under, weight_and_bias

FIRST_LAYER = "conformer_layers.0."
GIVEN = {"num_heads": int, "convolution_first": bool}


def _given(config: dict[str, Any]) -> tuple[int, bool]:
    for key, value in config.items():
        if key not in GIVEN:
            raise CheckpointError(f"conformer config: unknown key {key!r}")
        if type(value) is not GIVEN[key]:
            raise CheckpointError(f"conformer config: {key} must be of type {GIVEN[key].__name__} ({value!r})")
    return config["num_heads"], config["convolution_first"]


def _shape(tensors: Tensors, name: str, axes: int) -> tuple[int, ...]:
    tensor = tensors.get(FIRST_LAYER + name)
    if tensor is None:
        raise CheckpointError(f"conformer: tensor {FIRST_LAYER + name!r} is missing")
    if tensor.ndim != axes:
        raise CheckpointError(f"conformer: tensor {FIRST_LAYER + name!r} has shape {list(tensor.shape)}")
    return tuple(tensor.shape)


def _config(config: dict[str, Any], tensors: Tensors) -> ConformerEncoderConfig:
    heads, conv_first = _given(config)
    hidden, width = _shape(tensors, "ffn1.sequential.1.weight", 2)
    kernel = _shape(tensors, "conv_module.sequential.2.weight", 3)[-1]
    if heads < 1 or width % heads:
        raise CheckpointError(f"conformer config: num_heads {heads} does not divide the width {width}")
    numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("conformer_layers.")}
    if numbers != set(range(len(numbers))):
        raise CheckpointError(f"conformer: layer {min(set(range(len(numbers))) - numbers)} is missing")
    batch_norm = FIRST_LAYER + "conv_module.sequential.3.running_mean" in tensors
    block = ConformerConfig(
        AttentionConfig(width, heads), hidden, kernel, "batch" if batch_norm else "group", conv_first
    )
    return ConformerEncoderConfig(width, block, len(numbers), subsample=1, channels=0)


def _feed(foreign: str, ours: str) -> list[Row]:
    return [
        *weight_and_bias(f"{foreign}.sequential.0", f"{ours}_norm"),
        *weight_and_bias(f"{foreign}.sequential.1", f"{ours}.up"),
        *weight_and_bias(f"{foreign}.sequential.4", f"{ours}.down"),
    ]


def _pointwise(number: int, ours: str) -> list[Row]:
    foreign, ours = f"conv_module.sequential.{number}", f"convolution.{ours}"
    return [Row(f"{foreign}.weight", f"{ours}.weight", NO_LAST), Row(f"{foreign}.bias", f"{ours}.bias")]


def _rows(config: ConformerEncoderConfig) -> list[Row]:
    parts = [tuple(f"attention.{name}.{part}" for name in ("query", "key", "value")) for part in ("weight", "bias")]
    norm = "conv_module.sequential.3"
    rows = [
        *_feed("ffn1", "feed_before"),
        *weight_and_bias("self_attn_layer_norm", "attention_norm"),
        Row("self_attn.in_proj_weight", parts[0], THIRDS),
        Row("self_attn.in_proj_bias", parts[1], THIRDS),
        *weight_and_bias("self_attn.out_proj", "attention.out"),
        *weight_and_bias("conv_module.layer_norm", "convolution.before"),
        *_pointwise(0, "expand"),
        *weight_and_bias("conv_module.sequential.2", "convolution.depthwise"),
        *weight_and_bias(norm, "convolution.norm"),
        *_pointwise(5, "project"),
        *_feed("ffn2", "feed_after"),
        *weight_and_bias("final_layer_norm", "norm"),
    ]
    if config.block.conv_norm == "batch":
        buffers = ("running_mean", "running_var", "num_batches_tracked")
        rows += [Row(f"{norm}.{name}", f"convolution.norm.{name}") for name in buffers]
    return under("conformer_layers.{}.", "blocks.{}.", rows)


CONFORMER = Family(
    "conformer-torchaudio", ConformerEncoder,
    lambda tensors, config: FIRST_LAYER + "ffn1.sequential.0.weight" in tensors,
    _config, _rows,
)  # fmt: skip
