"""GPT-2 in the names of transformers' GPT2LMHeadModel and GPT2Model (Radford et al. 2019).

Traps: Conv1D is x @ W, so weights are transposed before the fused query, key and value are split. The released files
hold the causal mask, and lack the `transformer.` prefix and `lm_head`, which repeats the embedding."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.any.chat import chat_format
from multimodal.weights.family import Family, activation
from multimodal.weights.table import (
    THIRDS,
    TRANSPOSE,
    NameRow,
    Op,
    Tensors,
    joined,
    qkv,
    repeat,
    under,
    weight_and_bias,
)
from multimodal.weights.text import bert
from multimodal.weights.text.decoders import common
from multimodal.weights.text.decoders.common import directed

# GPT2Config's defaults
DEFAULTS = {
    "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "scale_attn_weights": True, "model_type": "gpt2",
}  # fmt: skip
OFF = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
PREFIX, EMBEDDING, HEAD = "transformer.", "wte.weight", "lm_head.weight"
TURNED_THIRDS = Op(lambda t: list(t.T.chunk(3)), lambda ours: joined(ours).T)


def config_from(text: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError for unsupported options."""
    for name in OFF:
        if text.get(name):
            raise CheckpointError(f"config.json: {name} {text[name]!r} is not supported")
    width = text["n_embd"]
    stack = transformer(
        width, text["n_layer"], text["n_head"], text["n_inner"] or 4 * width,
        activation=activation(text, "activation_function"), norm_eps=text["layer_norm_epsilon"],
    )  # fmt: skip
    if not text["scale_attn_weights"]:
        stack = replace(stack, block=replace(stack.block, attention=replace(stack.block.attention, scale=1.0)))
    tied = _tied(text, tensors, prefix)
    return directed(TextConfig(text["vocab_size"], text["n_positions"], stack, causal=True, tied=tied), text)


def _tied(text: dict[str, Any], tensors: Tensors, prefix: str) -> bool | None:
    """None: a GPT2Model, which has no logits. The released files have its names but are language models."""
    if not prefix and HEAD not in tensors:
        alone = text.get("architectures") == ["GPT2Model"] or not text["tie_word_embeddings"]
        return None if alone else True
    return bert.same(tensors, HEAD, prefix + EMBEDDING, absent=text["tie_word_embeddings"])


def rows(config: TextConfig, prefix: str) -> list[NameRow]:
    conv1d = partial(weight_and_bias, weight=TRANSPOSE)
    block = [
        *weight_and_bias("attn.c_attn", qkv("attention"), THIRDS, TURNED_THIRDS),
        *conv1d("attn.c_proj", "attention.out"), *conv1d("mlp.c_fc", "feed.up"), *conv1d("mlp.c_proj", "feed.down"),
        *weight_and_bias("ln_1", "attention_branch.norm"), *weight_and_bias("ln_2", "feed_branch.norm"),
    ]  # fmt: skip
    masks = [
        NameRow(f"h.{{}}.attn.{name}", reason="the causal mask", optional=True) for name in ("bias", "masked_bias")
    ]
    tower = [
        NameRow(EMBEDDING, "embed.weight"), NameRow("wpe.weight", "positions"),
        *under("h.{}.", "stack.blocks.{}.", block),
        *weight_and_bias("ln_f", "stack.norm"), *masks,
    ]  # fmt: skip
    head = NameRow(HEAD, "head.weight") if config.tied is False else repeat(HEAD, prefix + EMBEDDING)
    return [*under(prefix, "", tower), *([head] if prefix else [])]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return common.tokenizer(folder, config | {"max_position_embeddings": config["n_positions"]})


def _family(name: str, prefix: str) -> Family:
    return Family(
        name, TextTransformer, (prefix + EMBEDDING, f"{prefix}h.0.attn.c_attn.weight"),
        partial(config_from, prefix=prefix), partial(rows, prefix=prefix), tokenizer, needs="config.json",
        defaults=DEFAULTS, types=("", "gpt2"), chat=chat_format,
    )  # fmt: skip


FAMILY, BARE = _family("gpt2", PREFIX), _family("gpt2-bare", "")
