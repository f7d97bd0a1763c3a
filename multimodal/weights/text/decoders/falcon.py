"""Falcon (Almazrouei et al. 2023) in transformers' names: 7B, 40B, 180B, Falcon 2 and Falcon-RW.

Traps: both branches read a layer's input, with one norm in the 7B, each with its own in larger ones, and again one in
Falcon 2. Query, key and value are one map: all queries, then the one key and value; or those of each group together.
Falcon-RW has ALiBi, divided by the root of a head's width like the scores; transformers rounds it to bfloat16, which
moves far positions."""

from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.weights.family import activation, renamed
from multimodal.weights.table import NameRow, linears
from multimodal.weights.text.decoders.common import DecoderSpec, changed, families, fused_qkv
from multimodal.weights.text.decoders.rope import positions

OLD = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
TWO = {"ln_attn": "attention_branch.norm", "ln_mlp": "feed_branch.norm"}
ONE = {"input_layernorm": "attention_branch.norm", "post_attention_layernorm": "feed_branch.norm"}


def _config(text: dict[str, Any]) -> TextConfig:
    """Raises CheckpointError for norms that no release has."""
    new, norms, width = text["new_decoder_architecture"], text.get("num_ln_in_parallel_attn"), text["hidden_size"]
    norms = norms or (2 if new else 1)
    parallel = {True: ("one", "two")[norms == 2], False: None}[text["parallel_attn"]]
    if norms not in (1, 2) or (new and not parallel) or (norms == 2 and not new):
        raise CheckpointError(
            f"config.json: num_ln_in_parallel_attn {norms!r}, new_decoder_architecture {new!r}, parallel_attn "
            f"{text['parallel_attn']!r} is not supported"
        )
    heads = text["num_attention_heads"]
    stack = transformer(
        width, text["num_hidden_layers"], heads, text["ffn_hidden_size"] or 4 * width,
        activation=activation(text, "activation"), norm_eps=text["layer_norm_epsilon"],
    )  # fmt: skip
    made = TextConfig(text["vocab_size"], text["max_position_embeddings"], stack, True, positions=_positions(text))
    keys = text["num_kv_heads"] if new else 1 if text["multi_query"] else heads
    return changed(made, {"parallel": parallel}, kv_heads=None if keys in (heads, None) else keys, bias=text["bias"])


def _positions(text: dict[str, Any]) -> PositionConfig:
    turning = positions(text)
    if not text["alibi"]:
        return turning
    return PositionConfig("alibi", gain=(text["hidden_size"] // text["num_attention_heads"]) ** -0.5)


def _rows(config: TextConfig) -> list[NameRow]:
    own, parallel = config.stack.block.attention, config.stack.block.parallel
    fused = fused_qkv("self_attention.query_key_value", own.key_heads, own.heads // own.key_heads, 1, own.head_size)
    return [*fused, *linears(TWO if parallel == "two" else ONE)]


FALCON, FALCON_MODEL = families(DecoderSpec(
    ("falcon",), _config,
    {"self_attention.dense": "attention.out", "mlp.dense_h_to_4h": "feed.up", "mlp.dense_4h_to_h": "feed.down"},
    {"layer_norm_epsilon": 1e-5, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True,
     "bias": False, "num_kv_heads": None, "ffn_hidden_size": None, "activation": "gelu",
     "max_position_embeddings": 2048, "tie_word_embeddings": True, "alibi": False},
    _rows, ends={"word_embeddings": "embed", "ln_f": "stack.norm"}, base="transformer.", layer="h.{}.",
    first="self_attention.query_key_value.weight",
    unread=("self_attention.rotary_emb.inv_freq",),
), complete=renamed(OLD))  # fmt: skip
