"""BART (Lewis et al. 2020) and mBART (Liu et al. 2020) in transformers' names, and what M2M100 and Marian share with
them.

Traps: learned positions begin at row 2 of their table. BART has norms after each sum and on the embeddings; mBART has
them before each branch and at the end. The bias of the logits is a buffer of shape [1, V]. The embedding has up to four
names. Files of BartModel, such as facebook/bart-base, lack `model.` and the bias."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.system.files import optional_json
from multimodal.tokens.text.hub.fairseq import pieces_tokenizer
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.weights.family import Family, activation
from multimodal.weights.table import NO_FIRST, NameRow, Tensors, linears, repeat, under, weight_and_bias
from multimodal.weights.text import bert

# BartConfig's defaults, which are MBartConfig's but for an id to begin with
DEFAULTS = {
    "vocab_size": 50265, "d_model": 1024, "max_position_embeddings": 1024, "activation_function": "gelu",
    "encoder_layers": 12, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_layers": 12,
    "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "scale_embedding": False, "eos_token_id": 2,
    "bos_token_id": 0, "pad_token_id": 1, "decoder_start_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
PARTS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
MBART50 = ("MBart50Tokenizer", "MBart50TokenizerFast")
LEARNED = PositionConfig("learned", first=2)
HEAD, LOGIT_BIAS = "lm_head.weight", "final_logits_bias"


def text_to_text(
    c: dict[str, Any], tensors: Tensors, positions: PositionConfig, *, post_norm: bool, stem_norm: bool,
    prefix: str = "model.",
) -> EncoderDecoderConfig:  # fmt: skip
    """Raises CheckpointError for an unknown activation, sinusoids of an odd
    width, and embeddings that should repeat one another and differ."""
    width, shared = c["d_model"], c.get("share_encoder_decoder_embeddings", True)
    if positions.kind == "sinusoidal" and width % 2:
        raise CheckpointError(f"config.json: d_model {width} must be even for sinusoidal positions")
    table = f"{prefix}shared.weight" if shared else f"{prefix}decoder.embed_tokens.weight"
    if shared:
        check_repeats(tensors, table, [f"{prefix}{side}.embed_tokens.weight" for side in ("encoder", "decoder")])
    tied = bert.same(tensors, HEAD, table, absent=c["tie_word_embeddings"])

    def stack(side: str):
        made = transformer(
            width, c[f"{side}_layers"], c[f"{side}_attention_heads"], c[f"{side}_ffn_dim"],
            activation=activation(c, "activation_function"), final_norm=not post_norm,
            source_width=width if side == "decoder" else None,
        )  # fmt: skip
        return replace(made, block=replace(made.block, post_norm=post_norm))

    scale = width**0.5 if c["scale_embedding"] else 1.0
    common = {"positions": positions, "stem_norm": stem_norm, "embed_scale": scale}
    size = c["vocab_size"] if shared else c["decoder_vocab_size"] or c["vocab_size"]
    context = c["max_position_embeddings"]
    encoder = TextConfig(0 if shared else c["vocab_size"], context, stack("encoder"), causal=False, **common)
    bias: Literal["fixed", False] = "fixed" if LOGIT_BIAS in tensors else False
    decoder = TextConfig(size, context, stack("decoder"), causal=True, tied=tied, head_bias=bias, **common)
    return EncoderDecoderConfig(encoder, decoder, start_id(c))


def start_id(c: dict[str, Any], unstated: str = "eos_token_id") -> int:
    """Id that decoding begins with, by default bos, as in transformers, or else that of the key `unstated`. Raises
    CheckpointError if it is outside the vocabulary."""
    start = next((c[key] for key in ("decoder_start_token_id", "bos_token_id") if c.get(key) is not None), c[unstated])
    if type(start) is not int or not 0 <= start < c["vocab_size"]:
        raise CheckpointError(f"config.json: decoder_start_token_id {start!r} is outside {c['vocab_size']} tokens")
    return start


def check_repeats(tensors: Tensors, of: str, names: Sequence[str]) -> None:
    """Raise CheckpointError for a tensor that differs from the one it should repeat."""
    for name in names:
        if name in tensors and of in tensors and not torch.equal(tensors[name], tensors[of]):
            raise CheckpointError(f"tensor {name!r} differs from {of!r}, which it should repeat")


def _complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return ({"decoder_start_token_id": None} if config.get("model_type") == "mbart" else {}) | config


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str = "model.") -> EncoderDecoderConfig:
    """`model_type` says where the norms are, as in transformers; without one the tensors do."""
    kind = config.get("model_type")
    pre = kind == "mbart" if kind else f"{prefix}encoder.layer_norm.weight" in tensors
    return text_to_text(config, tensors, LEARNED, post_norm=not pre, stem_norm=True, prefix=prefix)


def _block(cross: bool) -> list[NameRow]:
    attentions = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if cross else {})
    rows = [row for theirs, own in attentions.items() for row in under(f"{theirs}.", f"{own}.", linears(PARTS))]
    names = {f"{theirs}_layer_norm": f"{own}_branch.norm" for theirs, own in attentions.items()}
    return rows + linears(names | {"fc1": "feed.up", "fc2": "feed.down", "final_layer_norm": "feed_branch.norm"})


def _tower(side: str, tower: TextConfig) -> list[NameRow]:
    return [
        *under("layers.{}.", "stack.blocks.{}.", _block(cross=side == "decoder")),
        *([NameRow("embed_positions.weight", "positions")] if tower.positions.kind == "learned" else []),
        *(weight_and_bias("layernorm_embedding", "norm") if tower.stem_norm else []),
        *(weight_and_bias("layer_norm", "stack.norm") if tower.stack.final_norm else []),
    ]


def rows(config: EncoderDecoderConfig, prefix: str = "model.", head: bool = True) -> list[NameRow]:
    """`head`: the file may have one, and its bias."""
    made = [row for side in ("encoder", "decoder") for row in under(
        f"{prefix}{side}.", f"{side}.", _tower(side, getattr(config, side)))]  # fmt: skip
    names = [f"{prefix}{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    table = names[1] if config.encoder.vocabulary else f"{prefix}shared.weight"
    made.append(NameRow(table, "decoder.embed.weight"))
    if config.encoder.vocabulary:
        made.append(NameRow(names[0], "encoder.embed.weight"))
    else:
        made += [repeat(name, table) for name in names]
    if head:
        made.append(repeat(HEAD, table) if config.decoder.tied else NameRow(HEAD, "decoder.head.weight"))
    if config.decoder.head_bias:
        made.append(NameRow(LOGIT_BIAS, "decoder.tied_bias" if config.decoder.tied else "decoder.head.bias", NO_FIRST))
    return made


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """None for mBART-25, whose languages stand elsewhere than mBART-50's."""
    kind = optional_json(folder / RECORD).get("tokenizer_class") if folder else None
    if config.get("model_type") == "mbart" and kind not in MBART50:
        return None
    made = pieces_tokenizer(folder, config, config["vocab_size"]) if folder else None
    return made or hub_tokenizer(folder, config)


FAMILY = Family(
    "bart", EncoderDecoder, ("model.encoder.layernorm_embedding.weight", "model.decoder.embed_positions.weight"),
    config_from, rows, tokenizer, complete=_complete, needs="config.json", defaults=DEFAULTS,
    types=("", "bart", "mbart"),
)  # fmt: skip
BODY = replace(
    FAMILY, name="bart-body", has=tuple(name.removeprefix("model.") for name in FAMILY.has),
    config_from=partial(config_from, prefix=""), rows=partial(rows, prefix="", head=False),
)  # fmt: skip
