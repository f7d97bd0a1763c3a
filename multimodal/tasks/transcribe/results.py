"""Transcription of a part of a recording, as both kinds of speech model return it, and its journal record."""

import zlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.system.journal import JournalPart
from multimodal.system.records import to_record
from multimodal.tasks.transcribe.timeline import Span
from multimodal.tasks.transcribe.word_times import WordTiming, snap_to_audio, wave_level


@dataclass
class Transcription:
    """Segments, their tokens, the samples covered, and the decode log."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    coverage: list[Span] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Transcription":
        """From a record of `to_record`."""
        return cls(**record | {"coverage": [Span(*span) for span in record["coverage"]]})

    def extend(self, other: "Transcription") -> None:
        for own, more in zip(vars(self).values(), vars(other).values(), strict=True):
            own += more

    def lengths(self) -> list[int]:
        return [len(own) for own in vars(self).values()]

    def since(self, lengths: list[int]) -> "Transcription":
        """Select what was added after `lengths()`."""
        return Transcription(*(own[length:] for own, length in zip(vars(self).values(), lengths, strict=True)))


class WindowTranscript(NamedTuple):
    """Text of one window; word times in seconds from its beginning.

    `avg_logprob`: log-probability per token, counting the end as one; with a CTC that of its best path, independent of
    beam and language model. `no_speech_prob`: probability of an empty text. `cut`: at the most tokens of a window."""

    ids: list[int]
    words: list[WordTiming]
    avg_logprob: float
    no_speech_prob: float
    cut: bool = False

    def snap_to_audio(self, wave: Float[Tensor, "T"]) -> "WindowTranscript":
        """Snap the word times to the window's audio."""
        return self._replace(words=snap_to_audio(self.words, wave_level(wave)))

    @property
    def confidence(self) -> float:
        """Mean alignment probability of the words; 1 without words."""
        return sum(word.probability for word in self.words) / len(self.words) if self.words else 1.0


def journalled(
    stream: Generator[Any, Any, Transcription], journal: JournalPart
) -> Generator[Any, Any, Transcription]:  # fmt: skip
    """The stream's transcription: that in the journal, or a new one, which the journal then keeps."""
    if journal.records:
        return Transcription.of(journal.records[0])
    transcription = yield from stream
    journal.add(to_record(transcription))
    return transcription


def compression_ratio(text: str) -> float:
    """UTF-8 size over zlib size. Above about 2.4 the text is repetitive."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
