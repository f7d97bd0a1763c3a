"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025) in transformers' names, the texts' decoder alone of Gemma 3, and
EmbeddingGemma.

Traps: a norm's gain is 1 + weight. Embeddings are multiplied by √D. Gemma 2 and 3 have a norm before and one after each
branch. Gemma 2 caps scores and logits, and every second layer sees a window; in Gemma 3 all but every sixth do, with
positions of another base, and scaling is for the others alone. Gemma 1's first files say "gelu" and mean its tanh
approximation. EmbeddingGemma attends in both directions, half of `sliding_window` on each side."""

from dataclasses import replace
from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.family import activation
from multimodal.weights.text import llama
from multimodal.weights.text.decoders.common import (
    GATED,
    LLAMA,
    SELF,
    DecoderSpec,
    changed,
    families,
    windowed,
)  # fmt: skip
from multimodal.weights.text.decoders.llama_kin import DEFAULTS, QK_NORMS
from multimodal.weights.text.decoders.rope import by_kind_of_layer, positions

NORMS = {
    "input_layernorm": "attention_branch.norm", "post_attention_layernorm": "attention_branch.out_norm",
    "pre_feedforward_layernorm": "feed_branch.norm", "post_feedforward_layernorm": "feed_branch.out_norm",
}  # fmt: skip
SIZES = DEFAULTS | {"vocab_size": 256000, "head_dim": 256, "tie_word_embeddings": True, "num_key_value_heads": 16,
                    "max_position_embeddings": 8192, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
LATER = SIZES | {"num_key_value_heads": 4, "num_attention_heads": 8, "hidden_size": 2304, "num_hidden_layers": 26,
                 "intermediate_size": 9216, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
                 "sliding_window": 4096, "final_logit_softcapping": None, "attn_logit_softcapping": None}  # fmt: skip
CAPS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}


def _gemma(text: dict[str, Any]) -> TextConfig:
    first = text["model_type"] == "gemma"
    own = activation(text, "hidden_act") if first else activation(text, "hidden_activation", "hidden_act")
    own = "gelu_tanh" if own == "gelu" and first else own
    made = changed(llama.hf_body(text), {"norm": "rms_plus", "activation": own})
    return replace(made, embed_scale=text["hidden_size"] ** 0.5)


def _sandwiched(text: dict[str, Any], **attention: Any) -> TextConfig:
    made = changed(_gemma(text), {"out_norm": True}, scale=text["query_pre_attn_scalar"] ** -0.5,
                   softcap=text["attn_logit_softcapping"], **attention)  # fmt: skip
    return replace(made, logit_cap=text["final_logit_softcapping"])


def _gemma2(text: dict[str, Any]) -> TextConfig:
    return windowed(_sandwiched(text), text, lambda layer: layer % 2 == 0)


def _gemma3(text: dict[str, Any]) -> TextConfig:
    ropes, theta = text.get("rope_parameters") or {}, {"rope_theta": text["rope_theta"]}
    far = ropes.get("full_attention") or (text.get("rope_scaling") or {}) | theta
    near = ropes.get("sliding_attention") or {"rope_theta": text["rope_local_base_freq"]}
    text = by_kind_of_layer(text)
    made = _sandwiched(text | {"rope_parameters": far}, qk_norm="rms_plus", qk_norm_eps=text["rms_norm_eps"])
    if text["use_bidirectional_attention"]:
        made, text = replace(made, causal=False), text | {"sliding_window": text["sliding_window"] // 2 + 1}
    every = text["sliding_window_pattern"]
    return windowed(made, text, lambda layer: (layer + 1) % every != 0, positions(text, near))


ONE_WAY = {"use_bidirectional_attention": (None, False)}
TANH = {"hidden_activation": (None, "gelu", "gelu_pytorch_tanh")}  # in Gemma 1 transformers reads hidden_act alone
GEMMA, GEMMA_MODEL = families(DecoderSpec(("gemma",), _gemma, LLAMA, SIZES, only=ONE_WAY | TANH))
GEMMA2, GEMMA2_MODEL = families(DecoderSpec(("gemma2",), _gemma2, SELF | GATED | NORMS, LATER | CAPS, only=ONE_WAY))
GEMMA3, GEMMA3_MODEL = families(DecoderSpec(
    ("gemma3_text",), _gemma3, SELF | GATED | NORMS | QK_NORMS,
    LATER | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6,
             "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6, "use_bidirectional_attention": False},
    only={"attn_logit_softcapping": (None,)},  # transformers does not apply it
))  # fmt: skip
