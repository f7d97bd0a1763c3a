"""T5 (Raffel et al. 2020), T5 v1.1, mT5, Flan-T5 and ByT5 in transformers' names, and T5's encoder alone.

Traps: attention is not divided by √E, and heads need not fill the width. Block 0 of each stack holds the distance table
of all blocks. Norms are RMS; there are no biases. T5's head is the embedding on states times 1/√D, that of v1.1 and
later a map of its own without the factor: transformers 4 states this by `tie_word_embeddings`, transformers 5 by
`scale_decoder_outputs`. `wi_0` is the gate. Google's files hold an unused distance table of the cross-attention."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.system.records import checked
from multimodal.tokens.text.t5 import t5_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import ACTIVATIONS, Family
from multimodal.weights.table import NameRow, Tensors, repeat, under
from multimodal.weights.text import bart, bert
from multimodal.weights.text.sentence import lowers, sentence_length

# T5Config's defaults, and those of MT5Config that differ; mT5 never scales, whatever its files say of ties
T5 = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None,
    "num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": None, "n_positions": 512, "tie_word_embeddings": True,
}  # fmt: skip
MT5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
TRANSLATION = re.compile(r"translation_([a-z]{2})_to_([a-z]{2})")
PARTS = {"q": "query", "k": "key", "v": "value", "o": "out"}
TABLE, FIRST_BLOCK = "shared.weight", "block.0.layer.0.SelfAttention.q.weight"


def _complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    if config.get("model_type") != "mt5":
        return config
    return MT5 | config | {"scale_decoder_outputs": False}


def _encoder(c: dict[str, Any], vocabulary: int) -> TextConfig:
    kind = c["feed_forward_proj"]
    # "gated-gelu" has always meant the tanh approximation; the two newer keys override it
    activation = c.get("dense_act_fn", "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-"))
    gated = c.get("is_gated_act", kind.startswith("gated-"))
    if activation not in ACTIVATIONS or type(gated) is not bool:
        raise CheckpointError(
            f"config.json: feed_forward_proj {kind!r}, dense_act_fn {activation!r}, is_gated_act {gated!r} is not "
            "supported"
        )
    attention = AttentionConfig(c["d_model"], c["num_heads"], head_width=c["d_kv"], bias=False, scale=1.0)
    block = BlockConfig(
        attention, c["d_ff"], ACTIVATIONS[activation], gated, norm="rms", norm_eps=c["layer_norm_epsilon"]
    )
    positions = PositionConfig(
        "bucket", buckets=c["relative_attention_num_buckets"], furthest=c["relative_attention_max_distance"]
    )
    return TextConfig(vocabulary, c["n_positions"], StackConfig(block, c["num_layers"]), False, positions=positions)


def config_from(c: dict[str, Any], tensors: Tensors) -> EncoderDecoderConfig:
    """Raises CheckpointError for a separate head on scaled states, which no released model has."""
    bart.check_repeats(tensors, TABLE, [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")])
    tied = bert.same(tensors, bart.HEAD, TABLE, absent=c["tie_word_embeddings"])
    scaled = c.get("scale_decoder_outputs", c["tie_word_embeddings"])
    if scaled and not tied:
        raise CheckpointError(f"tensor {bart.HEAD!r} differs from the embedding, which the configuration ties it to")
    encoder = _encoder(c, 0)
    block = replace(encoder.stack.block, cross=encoder.stack.block.attention)
    decoder = replace(
        encoder, vocabulary=c["vocab_size"], causal=True, tied=tied,
        stack=StackConfig(block, c["num_layers"] if c["num_decoder_layers"] is None else c["num_decoder_layers"]),
        logit_scale=c["d_model"] ** -0.5 if scaled else 1.0,
    )  # fmt: skip
    return EncoderDecoderConfig(encoder, decoder, bart.start_id(c, "pad_token_id"))


def encoder_config(c: dict[str, Any], tensors: Tensors) -> TextConfig:
    bart.check_repeats(tensors, TABLE, ["encoder.embed_tokens.weight"])
    return _encoder(c, c["vocab_size"])


def _tower(tower: TextConfig, cross: bool) -> list[NameRow]:
    names = {f"layer.0.SelfAttention.{theirs}": f"attention.{own}" for theirs, own in PARTS.items()}
    if cross:
        names |= {f"layer.1.EncDecAttention.{theirs}": f"cross.{own}" for theirs, own in PARTS.items()}
        names["layer.1.layer_norm"] = "cross_branch.norm"
    feed = f"layer.{1 + cross}"
    ups = {"wi_0": "gate", "wi_1": "up"} if tower.stack.block.gated else {"wi": "up"}
    names |= {f"{feed}.DenseReluDense.{theirs}": f"feed.{own}" for theirs, own in (ups | {"wo": "down"}).items()}
    names |= {"layer.0.layer_norm": "attention_branch.norm", f"{feed}.layer_norm": "feed_branch.norm"}
    block = [NameRow(f"{theirs}.weight", f"{own}.weight") for theirs, own in names.items()]
    return [
        *under("block.{}.", "stack.blocks.{}.", block),
        NameRow("block.0.layer.0.SelfAttention.relative_attention_bias.weight", "bias.table.weight"),
        NameRow("final_layer_norm.weight", "stack.norm.weight"),
    ]


def rows(config: EncoderDecoderConfig) -> list[NameRow]:
    head = repeat(bart.HEAD, TABLE) if config.decoder.tied else NameRow(bart.HEAD, "decoder.head.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return [
        NameRow(TABLE, "decoder.embed.weight"), head, NameRow(unread, reason="unused", optional=True),
        *under("encoder.", "encoder.", _tower(config.encoder, cross=False)),
        *under("decoder.", "decoder.", _tower(config.decoder, cross=True)),
        *(repeat(f"{side}.embed_tokens.weight", TABLE) for side in ("encoder", "decoder")),
    ]  # fmt: skip


def encoder_rows(config: TextConfig) -> list[NameRow]:
    return [
        NameRow(TABLE, "embed.weight"), repeat("encoder.embed_tokens.weight", TABLE),
        *under("encoder.", "", _tower(config, cross=False)),
    ]  # fmt: skip


def encoder_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """`t5_tokenizer` with the longest text of a sentence-transformers folder. Raises CheckpointError."""
    made = t5_tokenizer(folder, config)
    if folder is not None and made is not None:
        if lowers(folder):
            raise CheckpointError(f"{folder}: do_lower_case true with T5's vocabulary is not supported")
        made.context = sentence_length(folder, config["n_positions"])
    return made


def card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """The words that ask for a translation, by its direction."""
    tasks = config.get("task_specific_params") or {}
    found = {name: TRANSLATION.fullmatch(str(name)) for name in tasks}
    prefixes = {f"{match[1]}-{match[2]}": checked(dict[str, Any], tasks[name], "task_specific_params").get("prefix")
                for name, match in found.items() if match}  # fmt: skip
    return {"translations": prefixes} if prefixes and all(isinstance(one, str) for one in prefixes.values()) else {}


FAMILY = Family(
    "t5", EncoderDecoder, (TABLE, f"encoder.{FIRST_BLOCK}", f"decoder.{FIRST_BLOCK}"), config_from, rows, t5_tokenizer,
    complete=_complete, card=card, needs="config.json", defaults=T5, types=("", "t5", "mt5"),
)  # fmt: skip
ENCODER = replace(
    FAMILY, name="t5-encoder", model=TextTransformer, has=FAMILY.has[:2], lacks=FAMILY.has[2:],
    config_from=encoder_config, rows=encoder_rows, tokenizer=encoder_tokenizer,
    card=lambda folder, config: {},
)  # fmt: skip
