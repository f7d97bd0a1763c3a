"""multimodal: vision, speech and text transformers on one small set of attention blocks.

    import multimodal
    multimodal.classify("photo.jpg", ["a dog", "a cat"])
    multimodal.transcribe("speech.flac")["text"]

`load`, `classify`, `transcribe`, `caption` and `generate` are imported on first use, since torch takes seconds.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["caption", "classify", "generate", "load", "transcribe"]

_HOMES = {
    "load": "multimodal.weights.load",
    "classify": "multimodal.tasks.classify.classify",
    "transcribe": "multimodal.tasks.transcribe.transcribe",
    "caption": "multimodal.tasks.caption.caption",
    "generate": "multimodal.tasks.text.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'multimodal' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
