"""Transcription of a part of a recording, as both kinds of speech model return it."""

import zlib
from dataclasses import dataclass, field
from typing import Any

from multimodal.tasks.transcribe.timeline import Span


@dataclass
class Transcription:
    """Segments, their tokens, the samples covered, and the decode log."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    coverage: list[Span] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)


def compression_ratio(text: str) -> float:
    """UTF-8 size over zlib size. Above about 2.4 the text is repetitive."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
