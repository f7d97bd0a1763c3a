"""Hybrid CTC/attention Conformer over the windows of a recording; segments are cut at pauses between words."""

import math
import warnings
from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Any

from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.conformer.decode import tokenizer_of
from multimodal.tasks.transcribe.options import LONGEST_WINDOW, RecognizerOptions, SpeechDecodingOptions
from multimodal.tasks.transcribe.results import Transcription, WindowTranscript, compression_ratio
from multimodal.tasks.transcribe.timeline import Span
from multimodal.tasks.transcribe.word_times import WordTiming
from multimodal.tokens.audio.levels import SILENT
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.weights.folder import Checkpoint

# Samples of a window. The shipped model's attention fails on audio longer than its training sentences. Word error rate
# in percent on 3 minutes each of joined test clips (AN4 / speechocean762 / LJSpeech, beam 5): each clip alone 4.1 /
# 41.6 / 76.0; windows of at most 6 s 5.0 / 43.7 / 77.7, 8 s 5.8 / 43.0 / 77.2, 10 s 6.9 / 45.1 / 76.7, 20 s
# 9.2 / 48.6 / 79.1. Shorter windows cut more words where nobody pauses.
LONGEST = int(LONGEST_WINDOW * RATE)
LONGEST_OTHERS = 30 * RATE  # of models trained elsewhere, on recordings of up to half a minute
LONGEST_LOCAL = 600 * RATE  # of models whose frames see their neighbours alone, in memory that grows with the length
SEGMENT_PAUSE = 0.5  # seconds between words at which a segment ends
LEAST_PROBABILITY = 1e-10  # probability of a token in a result
LONG_SEGMENT = 8.0  # seconds; a longer segment is cut at its longest pause


def longest(checkpoint: Checkpoint) -> int:
    """Most samples of a window."""
    encoder = checkpoint.model.config.encoder
    if min(getattr(encoder, "near", (-1, -1))) >= 0:
        return LONGEST_LOCAL
    return LONGEST if encoder.features == "fixed" else LONGEST_OTHERS


def stream(
    start: int, wave: Float[Tensor, "T"], checkpoint: Checkpoint, options: RecognizerOptions, name: str
) -> Generator[Tensor, WindowTranscript, Transcription]:
    """Transcribe one window that begins at sample `start` of the recording `name`; requests at most one decoding, and
    warns of a text that was cut.

    Its coverage is one span: transcribed, "silence" (digital silence), "no_speech" (by the model, or no text) or
    "unlikely" (a text below a threshold)."""
    result = Transcription()
    skipped: str | None = "silence"
    first, last = start / RATE, (start + len(wave)) / RATE
    if wave.abs().max() > SILENT:
        decoded = yield wave
        text = tokenizer_of(checkpoint).decode(decoded.ids)
        if options.decode_log:
            result.log.append({
                "seek": round(start / HOP), "start": first, "end": last, "temperature": 0.0,
                "avg_logprob": decoded.avg_logprob, "no_speech_prob": decoded.no_speech_prob, "tokens": decoded.ids,
                "text": text,
            })  # fmt: skip
        skipped = rejection(decoded, options) if text.strip() else "no_speech"
        if skipped is None:
            result.segments = list(_segments(decoded, first, last, options))
            result.tokens = [token for segment in result.segments for token in segment["tokens"]]
            if decoded.cut:
                where = f"{name}: {first:.2f} to {last:.2f} seconds"
                warnings.warn(f"{where}: the text was cut at {len(decoded.ids)} tokens, its limit", stacklevel=2)
    result.coverage.append(Span(start, start + len(wave), skipped))
    return result


def rejection(decoded: WindowTranscript, options: SpeechDecodingOptions) -> str | None:
    """Return "no_speech" or "unlikely" if a threshold of the options rejects the text."""
    if options.no_speech_threshold is not None and decoded.no_speech_prob > options.no_speech_threshold:
        return "no_speech"
    doubtful = options.confidence_threshold is not None and decoded.confidence < options.confidence_threshold
    unlikely = options.logprob_threshold is not None and decoded.avg_logprob < options.logprob_threshold
    return "unlikely" if doubtful or unlikely else None


def _segments(
    decoded: WindowTranscript, first: float, last: float, options: SpeechDecodingOptions
) -> Iterator[dict[str, Any]]:  # fmt: skip
    def within(start: float, end: float) -> dict[str, float]:
        """Times in the recording, to the millisecond but not beyond the window."""
        clamped = [min(max(first, round(first + time, 3)), last) for time in (start, end)]
        return {"start": clamped[0], "end": clamped[1]}

    for words in phrases(decoded.words):
        text = "".join(word.word for word in words).strip()
        if not text:
            continue
        segment = {
            "seek": round(first * RATE) // HOP, **within(words[0].start, words[-1].end), "text": text,
            "tokens": [token for word in words for token in word.tokens], "temperature": 0.0,
            "avg_logprob": decoded.avg_logprob, "compression_ratio": compression_ratio(text),
            "no_speech_prob": decoded.no_speech_prob,
        }  # fmt: skip
        if options.token_logprobs:  # a text without a CTC path has no probability
            each = [value for word in words for value in word.of_tokens or [0.0] * len(word.tokens)]
            segment["token_logprobs"] = [math.log(max(value, LEAST_PROBABILITY)) for value in each]
        if options.word_timestamps:
            segment["words"] = [word.entry(0) | within(word.start, word.end) for word in words]
        yield segment


def phrases(words: list[WordTiming]) -> list[list[WordTiming]]:
    """Cut words at pauses of SEGMENT_PAUSE seconds, and phrases longer than LONG_SEGMENT at their longest pause."""
    pauses = [after.start - before.end for before, after in pairwise(words)]
    if not pauses or (max(pauses) < SEGMENT_PAUSE and words[-1].end - words[0].start <= LONG_SEGMENT):
        return [words] if words else []
    at = pauses.index(max(pauses)) + 1
    return phrases(words[:at]) + phrases(words[at:])
