"""multimodal: vision, speech and text transformers on one small set of attention blocks.

    import multimodal
    classifier = multimodal.Classifier("clip-vit-16", ["a dog", "a cat"])
    classifier(["photo.jpg", image_array])
    multimodal.transcribe("speech.flac")["text"]

All names are imported on first use, since torch takes seconds.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "multimodal.errors": ["MultimodalError"],
    "multimodal.inference.prepare": ["prepare_for_inference"],
    "multimodal.tasks.ask.asker": ["Asker", "ask"],
    "multimodal.tasks.caption.caption": ["Captioner", "caption", "caption_many"],
    "multimodal.tasks.classify.classify": ["Classifier", "classify", "classify_many"],
    "multimodal.tasks.text.answer": ["Answerer", "answer"],
    "multimodal.tasks.text.embedder": ["Embedder", "embed_many"],
    "multimodal.tasks.text.generate": ["Generator", "generate", "generate_many"],
    "multimodal.tasks.text.tag": ["Tagger", "tag"],
    "multimodal.tasks.text.translate": ["Translator", "translate"],
    "multimodal.tasks.transcribe.transcribe": ["Transcriber", "transcribe", "transcribe_many"],
    "multimodal.weights.folder": ["Checkpoint"],
    "multimodal.weights.hub.listing": ["list_models"],
    "multimodal.weights.load": ["load"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        from multimodal.errors import did_you_mean

        raise AttributeError(f"module 'multimodal' has no attribute {name!r}{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
