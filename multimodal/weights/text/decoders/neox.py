"""GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023), and BLOOM (Le Scao et al. 2022), in transformers'
names.

Traps: query, key and value of each head lie together in one map. In GPT-NeoX both branches read a layer's input, each
with its norm, and a quarter of each head turns. BLOOM has ALiBi slopes, and a norm on the embeddings."""

from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.weights.family import activation, renamed
from multimodal.weights.table import NameRow
from multimodal.weights.text.decoders.common import DecoderSpec, changed, families, fused_qkv
from multimodal.weights.text.decoders.rope import positions

FEED = {"mlp.dense_h_to_4h": "feed.up", "mlp.dense_4h_to_h": "feed.down", "input_layernorm": "attention_branch.norm",
        "post_attention_layernorm": "feed_branch.norm"}  # fmt: skip
BLOOM_NAMES = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embed": "hidden_size",
               "seq_length": "max_position_embeddings"}  # fmt: skip


def _neox(text: dict[str, Any]) -> TextConfig:
    stack = transformer(
        text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"], text["intermediate_size"],
        activation=activation(text, "hidden_act"), norm_eps=text["layer_norm_eps"],
    )  # fmt: skip
    # transformers reads these two by their old names alone, where the scaling does not state them
    turning = positions(text | {"rope_theta": text["rotary_emb_base"], "partial_rotary_factor": text["rotary_pct"]})
    made = TextConfig(text["vocab_size"], text["max_position_embeddings"], stack, True, positions=turning)
    block = {"parallel": "two" if text["use_parallel_residual"] else None, "feed_bias": True}
    return changed(made, block, bias=text["attention_bias"])


def _bloom(text: dict[str, Any]) -> TextConfig:
    width = text["hidden_size"]
    stack = transformer(
        width, text["num_hidden_layers"], text["num_attention_heads"], 4 * width, activation="gelu_tanh",
        norm_eps=text["layer_norm_epsilon"],
    )  # fmt: skip
    return TextConfig(
        text["vocab_size"], text["max_position_embeddings"], stack, True, stem_norm=True,
        positions=PositionConfig("alibi"),
    )  # fmt: skip


def _fused(config: TextConfig, name: str) -> list[NameRow]:
    own = config.stack.block.attention
    return fused_qkv(name, own.heads, 1, 1, own.head_size)


NEOX, NEOX_MODEL = families(DecoderSpec(
    ("gpt_neox",), _neox, FEED | {"attention.dense": "attention.out"},
    {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
     "use_parallel_residual": True, "attention_bias": True, "tie_word_embeddings": False,
     "max_position_embeddings": 2048},
    lambda config: _fused(config, "attention.query_key_value"),
    ends={"embed_in": "embed", "final_layer_norm": "stack.norm"}, base="gpt_neox.", head="embed_out",
    first="attention.query_key_value.weight", only={"is_decoder": (False, True)},
    unread=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
))  # fmt: skip
BLOOM, BLOOM_MODEL = families(DecoderSpec(
    ("bloom",), _bloom, FEED | {"self_attention.dense": "attention.out"},
    {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 2048},
    lambda config: _fused(config, "self_attention.query_key_value"),
    ends={"word_embeddings": "embed", "word_embeddings_layernorm": "norm", "ln_f": "stack.norm"},
    base="transformer.", layer="h.{}.", first="self_attention.query_key_value.weight",
    only={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)}, unread=(),
), complete=renamed(BLOOM_NAMES))  # fmt: skip
