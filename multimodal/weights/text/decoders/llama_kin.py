"""Decoders in Llama's names: Qwen3 (Yang et al. 2025), SmolLM3 (Bakouch et al. 2025), Granite 3 (IBM 2024) and StableLM
2 (Bellagente et al. 2024).

Traps: Qwen3 norms the queries and keys of each head, and its heads need not fill the width. In SmolLM3 every fourth
layer has no positions. Granite has factors of embeddings, branches, scores and, dividing, logits. StableLM turns a
quarter of each head and has layer norms with biases."""

from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import LayerPattern, PositionConfig, TextConfig
from multimodal.weights.text import llama
from multimodal.weights.text.decoders.common import LLAMA, DecoderSpec, changed, families, windowed

QK_NORMS = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
DEFAULTS = llama.DEFAULTS | {"rms_norm_eps": 1e-6}


def _qwen3(text: dict[str, Any]) -> TextConfig:
    made = changed(llama.hf_body(text), qk_norm="rms", qk_norm_eps=text["rms_norm_eps"])
    return windowed(made, text, partial(llama.slides, text))


def _smollm3(text: dict[str, Any]) -> TextConfig:
    """Raises CheckpointError for layers with other numbers than 0 and 1, and for windows."""
    turned, every = text.get("no_rope_layers"), text["no_rope_layer_interval"]
    made = windowed(llama.hf_body(text), text | {"layer_types": None}, lambda layer: False)
    layers = made.stack.layers
    turned = [int((layer + 1) % every != 0) for layer in range(layers)] if turned is None else turned
    if len(turned) != layers or not set(turned) <= {0, 1} or "sliding_attention" in (text.get("layer_types") or ()):
        raise CheckpointError(
            f"config.json: no_rope_layers {turned!r:.80}, layer_types {text.get('layer_types')!r:.80}: expected "
            f"{layers} of 0 and 1, and full_attention"
        )
    still = tuple(layer for layer, rope in enumerate(turned) if not rope)
    return replace(made, pattern=LayerPattern(still, None, PositionConfig("none"))) if still else made


def _granite(text: dict[str, Any]) -> TextConfig:
    made = changed(llama.hf_body(text), {"residual_scale": text["residual_multiplier"]},
                   scale=text["attention_multiplier"])  # fmt: skip
    return replace(made, embed_scale=text["embedding_multiplier"], logit_scale=1 / text["logits_scaling"])


def _stablelm(text: dict[str, Any]) -> TextConfig:
    text = text | {"rms_norm_eps": text["layer_norm_eps"], "attention_bias": text["use_qkv_bias"], "mlp_bias": False}
    block = {"norm": "layer", "parallel": "one" if text["use_parallel_residual"] else None}
    return changed(llama.hf_body(text), block, out_bias=False)


QWEN3, QWEN3_MODEL = families(DecoderSpec(
    ("qwen3",), _qwen3, LLAMA | QK_NORMS,
    DEFAULTS | {"head_dim": 128, "num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28,
                "sliding_window": 4096, "max_position_embeddings": 32768},
    only={"hidden_act": ("silu",)},
))  # fmt: skip
SMOLLM3, SMOLLM3_MODEL = families(DecoderSpec(
    ("smollm3",), _smollm3, LLAMA,
    DEFAULTS | {"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "num_key_value_heads": 4,
                "max_position_embeddings": 32768},
    only={"hidden_act": ("silu",), "use_sliding_window": (False,)},
))  # fmt: skip
GRANITE, GRANITE_MODEL = families(DecoderSpec(
    ("granite",), _granite, LLAMA,
    DEFAULTS | dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0,
    ),
    only={"hidden_act": ("silu",)},
))  # fmt: skip
STABLELM, STABLELM_MODEL = families(DecoderSpec(
    ("stablelm",), _stablelm, LLAMA,
    DEFAULTS | {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": False,
                "use_parallel_residual": False, "num_key_value_heads": 32, "max_position_embeddings": 4096},
    only={"hidden_act": ("silu",), "qk_layernorm": (False,)},
))  # fmt: skip
