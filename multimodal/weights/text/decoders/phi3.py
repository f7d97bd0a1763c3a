"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024) in transformers' names.

Traps: query, key and value are one map, and so are gate and up. Longer contexts come by LongRoPE, whose divisors change
beyond `original_max_position_embeddings`. Phi-4 mini turns three quarters of each head."""

from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.family import activation
from multimodal.weights.table import HALVES, NameRow, weight_and_bias
from multimodal.weights.text import llama
from multimodal.weights.text.decoders.common import (
    NORMS,
    DecoderSpec,
    changed,
    families,
    fused_qkv,
    windowed,
)  # fmt: skip
from multimodal.weights.text.decoders.llama_kin import DEFAULTS


def _config(text: dict[str, Any]) -> TextConfig:
    made = changed(llama.hf_body(text), {"activation": activation(text, "hidden_act")})
    return windowed(made, text | {"layer_types": None}, lambda layer: True)


def _fused(config: TextConfig) -> list[NameRow]:
    own = config.stack.block.attention
    return [
        *fused_qkv("self_attn.qkv_proj", 1, own.heads, own.key_heads, own.head_size),
        *weight_and_bias("mlp.gate_up_proj", ("feed.gate", "feed.up"), HALVES),
    ]


PHI3, PHI3_MODEL = families(DecoderSpec(
    ("phi3",), _config, NORMS | {"self_attn.o_proj": "attention.out", "mlp.down_proj": "feed.down"},
    DEFAULTS | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096},
    _fused, first="self_attn.qkv_proj.weight",
))  # fmt: skip
