"""Rotary positions of a Hugging Face configuration: `rope_parameters` (from transformers 5 on), or `rope_theta` with
`rope_scaling`. Kinds: default, linear, llama3, dynamic, yarn and longrope."""

import math
from dataclasses import replace
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig

BASE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
KEYS = {
    "default": BASE | {"factor"}, "linear": BASE | {"factor"}, "dynamic": BASE | {"factor"},
    "llama3": BASE | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": BASE | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
                    "mscale", "mscale_all_dim", "truncate"},
    "longrope": BASE | {"factor", "original_max_position_embeddings", "attention_factor", "short_factor",
                        "long_factor", "short_mscale", "long_mscale"},
}  # fmt: skip
ALIASES = {"su": "longrope"}  # Phi-3's first files
WHOLE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2", "olmo3",
         "granite", "starcoder2", "falcon", "modernbert", "nomic_bert")  # fmt: skip
TRAINED = "original_max_position_embeddings"


def by_kind_of_layer(text: dict[str, Any]) -> dict[str, Any]:
    """Drop the trained length, which transformers does not read beside ropes by kind of layer."""
    return text | {TRAINED: None}


def positions(text: dict[str, Any], rope: dict[str, Any] | None = None) -> PositionConfig:
    """`rope`: of layers that have their own. Raises CheckpointError for an unknown kind, an unknown key, and values
    that are no scaling."""
    rope = _stated(text) if rope is None else rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = ALIASES.get(kind, kind)
    if kind not in KEYS:
        raise CheckpointError(f"config.json: rope scaling of kind {kind!r} is not supported (one of {', '.join(KEYS)})")
    if unknown := sorted(key for key in rope.keys() - KEYS[kind] if rope[key] is not None):
        raise CheckpointError(f"config.json: {unknown[0]} {rope[unknown[0]]!r} of rope scaling {kind!r} is not known")
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    part = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    width = int(head * part)
    if part != 1 and text.get("model_type") in WHOLE:
        kind = text["model_type"]
        raise CheckpointError(f"config.json: partial_rotary_factor {part!r} is not supported: {kind} turns whole heads")
    if not 0 < width <= head or width % 2:
        raise CheckpointError(
            f"config.json: partial_rotary_factor {part!r} of head width {head}: {width} numbers must be even, to rotate"
        )
    theta = rope.get("rope_theta", text.get("rope_theta", 10000.0))
    made = PositionConfig("rotary", theta=float(theta), share=None if width == head else width)
    return made if kind == "default" else SCALINGS[kind](made, text, rope, width)


def _stated(text: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or `rope_scaling`, which goes first in transformers, with the base that stands beside it."""
    own, scaling = text.get("rope_parameters") or {}, text.get("rope_scaling") or {}
    if not (own and scaling):
        return own or scaling
    used, told = (part.get("rope_theta", text.get("rope_theta")) for part in (scaling, own))
    if used != told:
        raise CheckpointError(
            f"config.json: rope_scaling goes first, and rope_parameters has rope_theta {told!r}: put it in rope_scaling"
        )
    return scaling


def _factor(rope: dict[str, Any], own: float | None = None) -> float:
    factor = float(rope["factor"] if own is None else own)
    if not (factor >= 1 and math.isfinite(factor)):
        raise CheckpointError(f"config.json: rope factor {factor} is below 1")
    return factor


def _trained(text: dict[str, Any], rope: dict[str, Any]) -> int:
    """Positions before the scaling; a value beside the rope's goes first, as in transformers."""
    count = text.get(TRAINED) or rope.get(TRAINED) or text["max_position_embeddings"]
    if type(count) is not int or count < 2:
        raise CheckpointError(f"config.json: {TRAINED} {count!r} is not a number of positions")
    return count


def _linear(made: PositionConfig, text: dict[str, Any], rope: dict[str, Any], width: int) -> PositionConfig:
    return replace(made, scale=1 / _factor(rope))


def _llama3(made: PositionConfig, text: dict[str, Any], rope: dict[str, Any], width: int) -> PositionConfig:
    low, high, trained = float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), _trained(text, rope)
    if not (0 < low < high and math.isfinite(high)):
        raise CheckpointError(f"config.json: rope factors {low} to {high} of {trained!r} positions are not a range")
    return replace(made, scale=1 / _factor(rope), turns=(low, high, trained))


def _dynamic(made: PositionConfig, text: dict[str, Any], rope: dict[str, Any], width: int) -> PositionConfig:
    return replace(made, dynamic=(_factor(rope), text["max_position_embeddings"]))


def _yarn(made: PositionConfig, text: dict[str, Any], rope: dict[str, Any], width: int) -> PositionConfig:
    trained = _trained(text, rope)
    factor = _factor(rope, rope.get("factor") or text["max_position_embeddings"] / trained)
    gain, part, whole = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if gain is None:
        gain = mscale(part) / mscale(whole) if part and whole else mscale(1.0)
    fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    truncate = rope.get("truncate", True)
    if not 0 < slow < fast or type(truncate) is not bool:
        raise CheckpointError(f"config.json: beta_slow {slow} to beta_fast {fast}, truncate {truncate!r} are no range")
    return replace(made, scale=1 / factor, gain=float(gain), yarn=(fast, slow, trained, truncate))


def _longrope(made: PositionConfig, text: dict[str, Any], rope: dict[str, Any], width: int) -> PositionConfig:
    trained = _trained(text, rope)
    factor, gain = rope.get("factor") or text["max_position_embeddings"] / trained, rope.get("attention_factor")
    for name in ("short_mscale", "long_mscale"):
        if rope.get(name) is not None:
            raise CheckpointError(f"config.json: {name} {rope[name]!r} of rope scaling 'longrope' is not supported")
    short, long = (tuple(map(float, rope[name])) for name in ("short_factor", "long_factor"))
    if {len(short), len(long)} != {width // 2} or min(*short, *long) <= 0:
        raise CheckpointError(f"config.json: short_factor and long_factor: expected {width // 2} positive numbers each")
    if gain is None:
        gain = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return replace(made, gain=float(gain), factors=short, long_factors=long, trained=trained)


SCALINGS = {"linear": _linear, "llama3": _llama3, "dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope}
