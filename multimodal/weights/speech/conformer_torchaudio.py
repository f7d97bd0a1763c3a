"""torchaudio.models.Conformer: an encoder without a stem, on features as wide as the model.

Shapes give the sizes. `num_heads` and `convolution_first` leave no trace in the weights and must be given: a wrong
value would run and give wrong results."""

from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.errors import CheckpointError
from multimodal.models.conformer import ConformerEncoder, ConformerEncoderConfig
from multimodal.weights.family import Family
from multimodal.weights.table import NO_LAST, NameRow, Tensors, in_proj, linears, under, weight_and_bias

FIRST_LAYER = "conformer_layers.0."
OPTIONS = {"num_heads": int, "convolution_first": bool}


def _options(config: dict[str, Any]) -> tuple[int, bool]:
    for key, value in config.items():
        if key not in OPTIONS:
            raise CheckpointError(f"conformer config: unknown key {key!r}")
        if type(value) is not OPTIONS[key]:
            raise CheckpointError(f"conformer config: {key} must be of type {OPTIONS[key].__name__} (got {value!r})")
    return config["num_heads"], config["convolution_first"]


def _shape(tensors: Tensors, name: str, axes: int) -> tuple[int, ...]:
    tensor = tensors.get(FIRST_LAYER + name)
    if tensor is None:
        raise CheckpointError(f"conformer: tensor {FIRST_LAYER + name!r} is missing")
    if tensor.ndim != axes:
        raise CheckpointError(f"conformer: tensor {FIRST_LAYER + name!r} has shape {list(tensor.shape)}")
    return tuple(tensor.shape)


def _config(config: dict[str, Any], tensors: Tensors) -> ConformerEncoderConfig:
    heads, conv_first = _options(config)
    hidden, width = _shape(tensors, "ffn1.sequential.1.weight", 2)
    kernel = _shape(tensors, "conv_module.sequential.2.weight", 3)[-1]
    if heads < 1 or width % heads:
        raise CheckpointError(f"conformer config: num_heads must divide the width {width} (got {heads})")
    numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("conformer_layers.")}
    if numbers != set(range(len(numbers))):
        raise CheckpointError(f"conformer: layer {min(set(range(len(numbers))) - numbers)} is missing")
    batch_norm = FIRST_LAYER + "conv_module.sequential.3.running_mean" in tensors
    block = ConformerConfig(
        AttentionConfig(width, heads), hidden, kernel, "batch" if batch_norm else "group", conv_first
    )
    return ConformerEncoderConfig(width, block, len(numbers), subsample=1, channels=0)


def _feed(foreign: str, ours: str) -> list[NameRow]:
    return under(f"{foreign}.sequential.", ours, linears({"0": "_norm", "1": ".up", "4": ".down"}))


def _rows(config: ConformerEncoderConfig) -> list[NameRow]:
    norm = "conv_module.sequential.3"
    rows = [
        *_feed("ffn1", "feed_before"),
        *weight_and_bias("self_attn_layer_norm", "attention_norm"),
        *in_proj("self_attn", "attention"),
        *weight_and_bias("self_attn.out_proj", "attention.out"),
        *weight_and_bias("conv_module.layer_norm", "convolution.before"),
        *weight_and_bias("conv_module.sequential.0", "convolution.expand", weight=NO_LAST),
        *weight_and_bias("conv_module.sequential.2", "convolution.depthwise"),
        *weight_and_bias(norm, "convolution.norm"),
        *weight_and_bias("conv_module.sequential.5", "convolution.project", weight=NO_LAST),
        *_feed("ffn2", "feed_after"),
        *weight_and_bias("final_layer_norm", "norm"),
    ]
    if config.block.conv_norm == "batch":
        buffers = ("running_mean", "running_var", "num_batches_tracked")
        rows += [NameRow(f"{norm}.{name}", f"convolution.norm.{name}") for name in buffers]
    return under("conformer_layers.{}.", "blocks.{}.", rows)


CONFORMER = Family(
    "conformer-torchaudio", ConformerEncoder, (FIRST_LAYER + "ffn1.sequential.0.weight",), _config, _rows,
)  # fmt: skip
