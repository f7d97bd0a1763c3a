"""T5 (Raffel et al. 2020), T5 v1.1, mT5, Flan-T5 and ByT5 in the names of transformers, and T5's encoder alone.

Traps: attention is not divided by √E, and heads need not fill the width; the one table of distances lies in block 0 of
each stack, for all blocks; norms are RMS, and nothing has a bias. T5's logits go through the embedding with states
times 1/√D, those of v1.1 and later through a map of their own without it: transformers up to version 4 says so by
`tie_word_embeddings`, from 5 on by `scale_decoder_outputs`. v1.1's `wi_0` is the gate. The files by Google also hold
a table of distances for the cross-attention, which nothing reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import TextToText, TextToTextConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import Row, Tensors, under
from multimodal.weights.text import bart, bert

# T5Config's own defaults, and those of MT5Config that differ; whatever its files say of ties, mT5 scales nothing
T5 = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None,
    "num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": None, "n_positions": 512, "tie_word_embeddings": True,
}  # fmt: skip
MT5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu",
       "scale_decoder_outputs": False}  # fmt: skip
PARTS = {"q": "query", "k": "key", "v": "value", "o": "out"}
TABLE, FIRST_BLOCK = "shared.weight", "block.0.layer.0.SelfAttention.q.weight"


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    made = bart.complete(config, T5 | (MT5 if config.get("model_type") == "mt5" else {}))
    start = made["pad_token_id"] if made["decoder_start_token_id"] is None else made["decoder_start_token_id"]
    layers = made["num_layers"] if made["num_decoder_layers"] is None else made["num_decoder_layers"]
    return made | {"decoder_start_token_id": start, "num_decoder_layers": layers}


def _encoder(c: dict[str, Any], vocabulary: int) -> TextConfig:
    kind = c["feed_forward_proj"]
    gated = kind.startswith("gated-")
    # "gated-gelu" has always meant the tanh approximation
    activation = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    if activation not in bart.ACTIVATIONS:
        raise CheckpointError(f"config.json: feed_forward_proj {kind!r} is not supported")
    attention = AttentionConfig(c["d_model"], c["num_heads"], head_width=c["d_kv"], bias=False, scale=1.0)
    block = BlockConfig(
        attention, c["d_ff"], bart.ACTIVATIONS[activation], gated, norm="rms", norm_eps=c["layer_norm_epsilon"]
    )
    positions = PositionConfig(
        "bucket", buckets=c["relative_attention_num_buckets"], furthest=c["relative_attention_max_distance"]
    )
    return TextConfig(vocabulary, c["n_positions"], StackConfig(block, c["num_layers"]), False, positions=positions)


def config_from(config: dict[str, Any], tensors: Tensors) -> TextToTextConfig:
    """Raises CheckpointError for a head of its own on scaled states, which no released model has."""
    c = _complete(config)
    bart.check_repeats(tensors, TABLE, [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")])
    tied = bert.same(tensors, bart.HEAD, TABLE, absent=c["tie_word_embeddings"])
    scaled = c.get("scale_decoder_outputs", c["tie_word_embeddings"])
    if scaled and not tied:
        raise CheckpointError(f"tensor {bart.HEAD!r} is not the embedding, which the configuration says it repeats")
    encoder = _encoder(c, 0)
    block = replace(encoder.stack.block, cross=encoder.stack.block.attention)
    decoder = replace(
        encoder, vocabulary=c["vocab_size"], stack=StackConfig(block, c["num_decoder_layers"]), causal=True, tied=tied,
        logit_scale=c["d_model"] ** -0.5 if scaled else 1.0,
    )  # fmt: skip
    return TextToTextConfig(encoder, decoder, bart.start_id(c))


def encoder_config(config: dict[str, Any], tensors: Tensors) -> TextConfig:
    c = _complete(config)
    bart.check_repeats(tensors, TABLE, ["encoder.embed_tokens.weight"])
    return _encoder(c, c["vocab_size"])


def _tower(tower: TextConfig, cross: bool) -> list[Row]:
    names = {f"layer.0.SelfAttention.{theirs}": f"attention.{own}" for theirs, own in PARTS.items()}
    if cross:
        names |= {f"layer.1.EncDecAttention.{theirs}": f"cross.{own}" for theirs, own in PARTS.items()}
        names["layer.1.layer_norm"] = "cross_branch.norm"
    feed = f"layer.{1 + cross}"
    ups = {"wi_0": "gate", "wi_1": "up"} if tower.stack.block.gated else {"wi": "up"}
    names |= {f"{feed}.DenseReluDense.{theirs}": f"feed.{own}" for theirs, own in (ups | {"wo": "down"}).items()}
    names |= {"layer.0.layer_norm": "attention_branch.norm", f"{feed}.layer_norm": "feed_branch.norm"}
    block = [Row(f"{theirs}.weight", f"{own}.weight") for theirs, own in names.items()]
    return [
        *under("block.{}.", "stack.blocks.{}.", block),
        Row("block.0.layer.0.SelfAttention.relative_attention_bias.weight", "bias.table.weight"),
        Row("final_layer_norm.weight", "stack.norm.weight"),
    ]


def rows(config: TextToTextConfig) -> list[Row]:
    head = bert.again(bart.HEAD, TABLE) if config.decoder.tied else Row(bart.HEAD, "decoder.head.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return [
        Row(TABLE, "decoder.embed.weight"), head, Row(unread, reason="nothing reads it", optional=True),
        *under("encoder.", "encoder.", _tower(config.encoder, cross=False)),
        *under("decoder.", "decoder.", _tower(config.decoder, cross=True)),
        *(bert.again(f"{side}.embed_tokens.weight", TABLE) for side in ("encoder", "decoder")),
    ]  # fmt: skip


def encoder_rows(config: TextConfig) -> list[Row]:
    return [
        Row(TABLE, "embed.weight"), bert.again("encoder.embed_tokens.weight", TABLE),
        *under("encoder.", "", _tower(config, cross=False)),
    ]  # fmt: skip


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    from multimodal.tokens.text.t5 import t5_tokenizer

    return t5_tokenizer(folder, _complete(config))


def _recognises(tensors: Tensors, config: dict[str, Any], decoder: bool) -> bool:
    fits = {TABLE, f"encoder.{FIRST_BLOCK}"} <= set(tensors) and (f"decoder.{FIRST_BLOCK}" in tensors) == decoder
    return fits and config.get("model_type", "t5") in ("t5", "mt5")


FAMILY = Family(
    "t5", TextToText, recognises=lambda tensors, config: _recognises(tensors, config, decoder=True),
    config_from=config_from, rows=rows, tokenizer=tokenizer,
)  # fmt: skip
ENCODER = Family(
    "t5-encoder", TextTransformer, recognises=lambda tensors, config: _recognises(tensors, config, decoder=False),
    config_from=encoder_config, rows=encoder_rows, tokenizer=tokenizer,
)  # fmt: skip
