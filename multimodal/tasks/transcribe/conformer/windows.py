"""The joint CTC/attention model over the windows of a recording: each a stream of its own for `schedule.run`, and
segments cut at the pauses between their words."""

from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.conformer.decode import (
    Heard,
    JointBeam,
    JointOptions,
    decode_windows,
    joint_beam,
    tokenizer_of,
)
from multimodal.tasks.transcribe.whisper.decode import compression_ratio
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.audio.levels import SILENT
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.weights.folder import Checkpoint

__all__ = ["Heard", "JointBeam", "JointOptions", "Window", "decode_windows", "joint_beam", "serve", "stream"]

# Samples of a window. The shipped model's attention fails on sound longer than the sentences that it learnt on. Word
# errors in percent of 3 minutes each of joined test clips (AN4 / speechocean762 / LJSpeech, beam 5): each clip alone
# 4.1 / 41.6 / 76.0; windows of at most 6 s 5.0 / 43.7 / 77.7, 8 s 5.8 / 43.0 / 77.2, 10 s 6.9 / 45.1 / 76.7, 20 s
# 9.2 / 48.6 / 79.1. A shorter window costs more cuts inside words where nobody pauses.
LONGEST = 8 * RATE
PAUSE = 0.5  # seconds between words at which a segment ends
LONG_SEGMENT = 8.0  # seconds of a segment, above which it is cut at its longest pause


class Window(NamedTuple):
    """What became of a window: [start, end) in seconds, its segments, and why there is none ("silence": digital
    silence, "no_speech": the model's gate, or nothing heard)."""

    start: float
    end: float
    segments: list[dict[str, Any]]
    skipped: str | None


def stream(
    start: int, wave: Float[Tensor, "T"], checkpoint: Checkpoint, options: JointOptions
) -> Generator[Tensor, Heard, Window]:
    """One window, which begins at sample `start` of its recording, for `schedule.run`: asks `serve` once."""
    first, last = start / RATE, (start + len(wave)) / RATE
    if wave.abs().max() <= SILENT:
        return Window(first, last, [], "silence")
    heard = yield wave
    text = tokenizer_of(checkpoint).decode(heard.ids).strip()
    if not text or unlikely(heard, options):
        return Window(first, last, [], "no_speech")
    return Window(first, last, list(_segments(heard, first, last, options)), None)


def serve(checkpoint: Checkpoint, requests: list[Tensor], options: JointOptions) -> list[Heard]:
    """The answers to the requests of several streams, as one batch."""
    return decode_windows(requests, checkpoint, options)


def unlikely(heard: Heard, options: JointOptions) -> bool:
    if options.no_speech_threshold is not None and heard.no_speech_prob > options.no_speech_threshold:
        return True
    if options.confidence_threshold is not None and heard.confidence < options.confidence_threshold:
        return True
    return options.logprob_threshold is not None and heard.avg_logprob < options.logprob_threshold


def _segments(heard: Heard, first: float, last: float, options: JointOptions) -> Iterator[dict[str, Any]]:
    for words in phrases(heard.words):
        text = "".join(word.word for word in words).strip()
        if not text:
            continue
        segment = {
            "seek": round(first * RATE) // HOP, "start": first + words[0].start,
            "end": min(first + words[-1].end, last), "text": text,
            "tokens": [token for word in words for token in word.tokens], "temperature": 0.0,
            "avg_logprob": heard.avg_logprob, "compression_ratio": compression_ratio(text),
            "no_speech_prob": heard.no_speech_prob,
        }  # fmt: skip
        if options.word_timestamps:
            segment["words"] = [
                {
                    "word": w.word,
                    "start": first + w.start,
                    "end": min(first + w.end, last),
                    "probability": w.probability,
                }
                for w in words
            ]
        yield segment


def phrases(words: list[WordTiming]) -> list[list[WordTiming]]:
    """Words cut at pauses of PAUSE seconds, and what is still longer than LONG_SEGMENT at its longest pause."""
    pauses = [after.start - before.end for before, after in pairwise(words)]
    if not pauses or (max(pauses) < PAUSE and words[-1].end - words[0].start <= LONG_SEGMENT):
        return [words] if words else []
    at = pauses.index(max(pauses)) + 1
    return phrases(words[:at]) + phrases(words[at:])
