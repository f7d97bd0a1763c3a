"""Kinds of model that each format holds."""

import math
from typing import Any

from multimodal.errors import UsageError
from multimodal.models.text import TextTransformer
from multimodal.weights.folder import Checkpoint

# of `Checkpoint.kind`, text in two
WORDS = {
    "vit": "ViT", "clip": "CLIP", "coca": "CoCa", "git": "GIT", "speech_to_text": "Whisper",
    "conformer": "Conformer without a head", "joint_conformer": "speech recognizer with CTC",
    "transducer": "transducer", "moonshine": "Moonshine", "canary": "Canary", "captioner": "captioner",
    "encoder": "text encoder", "decoder": "text decoder", "text_to_text": "text-to-text model",
    "any_to_text": "model of several inputs", "tabular": "model of tables",
}  # fmt: skip
NAMES = {"onnx": "ONNX export", "hf": "transformers", "ctranslate2": "CTranslate2", "gguf": "GGUF"}
HELD = {
    "onnx": ("clip", "vit", "joint_conformer", "speech_to_text", "encoder", "decoder", "text_to_text", "captioner"),
    "hf": ("clip", "vit", "speech_to_text", "encoder", "decoder", "text_to_text"),
    "ctranslate2": ("speech_to_text", "encoder", "decoder", "text_to_text"),
    "gguf": ("decoder",),
}


def check_kind(checkpoint: Checkpoint, to: str) -> None:
    """Raise UsageError for a model of a kind that the format does not hold."""
    kind, model = checkpoint.kind, checkpoint.model
    if isinstance(model, TextTransformer):
        kind = "decoder" if model.config.causal else "encoder"
    if kind == "decoder" and checkpoint.card.get("objective") == "prefix":
        raise UsageError(f"model {checkpoint.source}: {NAMES[to]} does not support prefix language models")
    if kind in HELD[to]:
        return
    others = [other for other, held in HELD.items() if kind in held]
    held = " or ".join(WORDS[one] for one in HELD[to])
    hint = f", which {' and '.join(others)} can hold" if others else ""
    raise UsageError(f"model {checkpoint.source}: {NAMES[to]} takes {held} (got {WORDS[kind]}{hint})")


def short_window(config: Any) -> int | None:
    """Number of tokens that some layers of a text model see, if it is below the context."""
    parts = (config, getattr(config, "pattern", None))
    windows = [window for part in parts if (window := getattr(part, "window", None))]
    return min((window for window in windows if window < config.context), default=None)


def differences(one: Any, other: Any, at: str = "", rounding: float = 0.0) -> list[str]:
    """Options in which two configurations, as nested tables, differ: each with the value of the second. `rounding`: the
    relative difference up to which numbers are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        inner = ((one.get(key), other[key], f"{at}.{key}" if at else key) for key in other)
        return [line for parts in inner for line in differences(*parts, rounding)]
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=rounding):
        return []
    return [] if one == other else [at if isinstance(other, dict) else f"{at} {other}"]
