"""Parakeet (FastConformer, Rekesh et al. 2023) in Hugging Face's names: CTC, RNN-T and TDT.

Traps: sines and cosines of the relative positions alternate; the blank is the last output, which a tokenizer may
list."""

import math
from pathlib import Path
from typing import Any

import torch

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.errors import CheckpointError
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.models.speech.transducer import PredictionConfig, Transducer, TransducerConfig
from multimodal.tokens.text.hub.files import recognizer_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family, feature_record
from multimodal.weights.table import NO_LAST, NameRow, Op, Tensors, linears, under, weight_and_bias

ALTERNATING = Op(
    lambda t: [torch.cat([t[:, 0::2], t[:, 1::2]], 1)],
    lambda ours: ours[0].unflatten(1, (2, -1)).transpose(1, 2).flatten(1),
)
ONLY = {"hidden_act": "silu", "subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2}
# of preprocessor_config.json
FEATURES = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400, "preemphasis": 0.97}


def encoder_config(config: dict[str, Any]) -> ConformerEncoderConfig:
    """From transformers' `encoder_config`. Raises CheckpointError."""
    for key, only in ONLY.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"parakeet config: {key} must be {only!r} (got {config[key]!r})")
    width, heads, kernel = config["hidden_size"], config["num_attention_heads"], config["conv_kernel_size"]
    if heads < 1 or width % heads:
        raise CheckpointError(f"parakeet config: {heads} heads do not divide the width {width}")
    if config["subsampling_factor"] not in (2, 4, 8):
        raise CheckpointError(f"parakeet config: subsampling_factor must be 2, 4 or 8 ({config['subsampling_factor']})")
    attention = AttentionConfig(width, heads, bias=config.get("attention_bias", True), relative=True)
    block = ConformerConfig(
        attention, config["intermediate_size"], kernel, "batch", conv_bias=config.get("convolution_bias", True)
    )
    return ConformerEncoderConfig(
        config["num_mel_bins"], block, config["num_hidden_layers"], config["subsampling_factor"],
        config["subsampling_conv_channels"], near=tuple(config.get("near", (-1, -1))), features="normalized",
        input_scale=math.sqrt(width) if config.get("scale_input", True) else 1.0,
    )  # fmt: skip


def _ctc_config(config: dict[str, Any], tensors: Tensors) -> ConformerCTCConfig:
    size = _last_blank(config, "pad_token_id")
    return ConformerCTCConfig(encoder_config(config["encoder_config"]), size, None)


def _transducer_config(config: dict[str, Any], tensors: Tensors) -> TransducerConfig:
    size, width = _last_blank(config, "blank_token_id"), config["decoder_hidden_size"]
    return TransducerConfig(
        encoder_config(config["encoder_config"]), size, PredictionConfig(width, config["num_decoder_layers"]),
        config.get("joint_hidden_size", width), config["hidden_act"], tuple(config.get("durations") or ()),
        config["max_symbols_per_step"],
    )  # fmt: skip


def _last_blank(config: dict[str, Any], key: str) -> int:
    """Size of the vocabulary without the blank."""
    size = config["vocab_size"] - 1
    if config[key] != size:
        raise CheckpointError(f"parakeet config: {key} {config[key]} is not the last of vocab_size {size + 1}")
    return size


def _block(biases: bool, conv_biases: bool) -> list[NameRow]:
    norms = {
        "norm_feed_forward1": "feed_before_norm", "norm_self_att": "attention_norm", "norm_conv": "convolution.before",
        "norm_feed_forward2": "feed_after_norm", "norm_out": "norm", "conv.norm": "convolution.norm",
    }  # fmt: skip
    maps = {f"feed_forward{n}.linear{i}": f"feed_{own}.{way}" for n, own in ((1, "before"), (2, "after"))
            for i, way in ((1, "up"), (2, "down"))}  # fmt: skip
    for part, own in {"q": "query", "k": "key", "v": "value", "o": "out"}.items():
        maps[f"self_attn.{part}_proj"] = f"attention.{own}"
    convolutions = [
        *weight_and_bias("conv.pointwise_conv1", "convolution.expand", weight=NO_LAST),
        *weight_and_bias("conv.depthwise_conv", "convolution.depthwise"),
        *weight_and_bias("conv.pointwise_conv2", "convolution.project", weight=NO_LAST),
    ]
    return [
        *linears(norms),
        *(row for row in linears(maps) if biases or not row.foreign.endswith("bias")),
        *(row for row in convolutions if conv_biases or not row.foreign.endswith("bias")),
        NameRow("self_attn.relative_k_proj.weight", "attention.relative.project.weight", ALTERNATING),
        NameRow("self_attn.bias_u", "attention.relative.content"),
        NameRow("self_attn.bias_v", "attention.relative.position"),
        *(NameRow(f"conv.norm.{name}", f"convolution.norm.{name}")
          for name in ("running_mean", "running_var", "num_batches_tracked")),
    ]  # fmt: skip


def encoder_rows(config: ConformerEncoderConfig) -> list[NameRow]:
    names = {"layers.0": "stem.first", "linear": "stem.project"}
    for i in range(config.subsample.bit_length() - 2):
        names |= {f"layers.{2 + 3 * i}": f"stem.depthwise.{i}", f"layers.{3 + 3 * i}": f"stem.pointwise.{i}"}
    block = _block(config.block.attention.bias, config.block.conv_bias)
    return [
        *under("encoder.subsampling.", "encoder.", linears(names)),
        *under("encoder.layers.{}.", "encoder.blocks.{}.", block),
    ]


def ctc_rows(config: ConformerCTCConfig) -> list[NameRow]:
    return [*encoder_rows(config.encoder), *weight_and_bias("ctc_head", "ctc", weight=NO_LAST)]


def transducer_rows(config: TransducerConfig) -> list[NameRow]:
    names = {"encoder_projector": "from_audio", "decoder.decoder_projector": "from_text", "joint.head": "head"}
    lstm = [f"{part}_l{i}" for i in range(config.prediction.layers)
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]  # fmt: skip
    return [
        *encoder_rows(config.encoder),
        *linears(names),
        NameRow("decoder.embedding.weight", "embed.weight"),
        *(NameRow(f"decoder.lstm.{name}", f"prediction.{name}") for name in lstm),
    ]


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return recognizer_tokenizer(folder, config["vocab_size"] - 1)


def check_features(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Nothing but a check of the features beside the weights."""
    stated = feature_record(folder, "preprocessor_config.json") if folder else {}
    for key, only in (FEATURES | {"feature_size": config["encoder_config"]["num_mel_bins"]}).items():
        if stated.get(key, only) != only:
            raise CheckpointError(f"{folder}: feature extractor: {key} must be {only} (got {stated[key]!r})")
    return {}


PARAKEET_CTC = Family(
    "parakeet-ctc", ConformerCTC, ("ctc_head.weight", "encoder.subsampling.linear.weight"), _ctc_config, ctc_rows,
    _tokenizer, card=check_features, needs="config.json", types=("", "parakeet_ctc"),
)  # fmt: skip
PARAKEET_TRANSDUCER = Family(
    "parakeet-transducer", Transducer, ("joint.head.weight", "encoder.subsampling.linear.weight"), _transducer_config,
    transducer_rows, _tokenizer, card=check_features, needs="config.json", defaults={"max_symbols_per_step": 10},
    types=("", "parakeet_rnnt", "parakeet_tdt"),
)  # fmt: skip
