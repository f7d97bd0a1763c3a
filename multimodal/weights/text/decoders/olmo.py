"""OLMo 2 (OLMo et al. 2025) and OLMo 3 in transformers' names.

Traps: norms follow each branch, before the sum, and none precedes it. Queries and keys are normed over all heads at
once. In OLMo 3 three of four layers see a window, and rope scaling is for the others alone."""

from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.text import llama
from multimodal.weights.text.decoders.common import GATED, SELF, DecoderSpec, changed, families, windowed
from multimodal.weights.text.decoders.llama_kin import DEFAULTS, QK_NORMS
from multimodal.weights.text.decoders.rope import by_kind_of_layer, positions

NAMES = SELF | GATED | QK_NORMS | {
    "post_attention_layernorm": "attention_branch.out_norm", "post_feedforward_layernorm": "feed_branch.out_norm",
}  # fmt: skip
OLMO = DEFAULTS | {"rms_norm_eps": 1e-5, "mlp_bias": False}


def _olmo2(text: dict[str, Any]) -> TextConfig:
    return changed(llama.hf_body(text), {"pre_norm": False, "out_norm": True}, qk_norm="rms", qk_norm_whole=True,
                   qk_norm_eps=text["rms_norm_eps"])  # fmt: skip


def _olmo3(text: dict[str, Any]) -> TextConfig:
    rope = text.get("rope_parameters") or {}
    plain = {"rope_theta": text["rope_theta"]}
    near = rope.get("sliding_attention") or (rope | {"rope_type": "default", "type": "default"} if rope else plain)
    far = rope.get("full_attention") or rope or text.get("rope_scaling") or plain
    text = by_kind_of_layer(text)
    made = _olmo2(text | {"rope_parameters": far})
    near = {key: value for key, value in near.items() if key in ("rope_theta", "rope_type", "type")}
    return windowed(made, text, lambda layer: (layer + 1) % 4 != 0, positions(text, near))


OLMO2, OLMO2_MODEL = families(DecoderSpec(("olmo2",), _olmo2, NAMES, OLMO, only={"hidden_act": ("silu",)}))
OLMO3, OLMO3_MODEL = families(DecoderSpec(
    ("olmo3",), _olmo3, NAMES, OLMO | {"rope_theta": 5e5, "sliding_window": 4096}, only={"hidden_act": ("silu",)},
))  # fmt: skip
