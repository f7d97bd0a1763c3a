"""Live transcription: partial lines while somebody speaks, final ones at pauses."""

import math
from collections.abc import Callable, Iterator
from itertools import takewhile
from time import monotonic
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.models.whisper import Whisper
from multimodal.tasks.transcribe.conformer.decode import tokenizer_of, with_language_model
from multimodal.tasks.transcribe.conformer.recognizer import ChunkedRecognizer, RedecodingRecognizer
from multimodal.tasks.transcribe.conformer.windows import rejection
from multimodal.tasks.transcribe.options import (
    LiveOptions,
    RecognizerOptions,
    SpeechDecodingOptions,
    WhisperOptions,
    options_for,
)
from multimodal.tasks.transcribe.results import WindowTranscript
from multimodal.tasks.transcribe.segmentation import LevelMeter, cut
from multimodal.tasks.transcribe.sessions import only_language, whisper_language
from multimodal.tasks.transcribe.vad import FRAME, SpeechDetector
from multimodal.tasks.transcribe.whisper.decode import model_and_tokenizer
from multimodal.tasks.transcribe.whisper.recognizer import WhisperRecognizer
from multimodal.tasks.transcribe.whisper.words import STRIDE
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.audio.pcm import PcmChunk, PcmReader
from multimodal.weights.folder import Checkpoint

Recognizer = RedecodingRecognizer | ChunkedRecognizer | WhisperRecognizer


class Event(NamedTuple):
    """A line; `start` and `end` in seconds of the stream. A partial line holds the utterance so far, of which the words
    in `stable` agree with the previous partial; a final line replaces the partials since the last final. `latency`:
    seconds from the arrival of the last sample needed to the line.

    The last event is the "summary", with `figures` (see `run`)."""

    kind: Literal["partial", "final", "summary"]
    text: str
    start: float
    end: float
    latency: float
    stable: str = ""
    figures: dict[str, float] | None = None


def run(read: Callable[[int], bytes], checkpoint: Checkpoint, options: LiveOptions | None = None) -> Iterator[Event]:
    """Transcribe a stream of raw mono 16-bit little-endian PCM; `read` is the one of `pcm.PcmReader`.

    A chunked model runs chunk by chunk, others decode the current utterance again at each step. If decoding falls
    behind, only the first partial of an utterance is made. `figures` of the summary: `seconds` of audio,
    `real_time_factor` (seconds of work per second of audio), the numbers of `partials` and `finals`, `latency_p50`,
    `latency_p95`, `latency_max` of all lines and `final_latency_…` of the finals.

    Raises UsageError for a model of another kind, and as `PcmReader` and `conformer.decode.language_model` do."""
    options = live_options(checkpoint, options)
    return LiveSession(checkpoint, options, PcmReader(read, options.rate)).events()


def live_options(checkpoint: Checkpoint, options: LiveOptions | None = None) -> LiveOptions:
    """Options with what they name loaded. Raises UsageError for options or a model unfit for speech, and as `run`
    does."""
    options, own = options or LiveOptions(), options_for(checkpoint, {})
    decode, threshold = options.decode or own, options.threshold
    if threshold is None:
        threshold = getattr(decode, "vad_threshold", own.vad_threshold)
    if isinstance(checkpoint.model, Whisper):
        whisper_language(checkpoint, decode)  # refuse what is unfit before reading anything
    else:
        if isinstance(decode, RecognizerOptions):
            only_language(checkpoint, decode.language, decode.task)
        decode = with_language_model(checkpoint, decode)
    return options.replace(decode=decode, threshold=threshold)


def new_recognizer(checkpoint: Checkpoint, options: SpeechDecodingOptions | WhisperOptions) -> Recognizer:
    """A recognizer for a new utterance."""
    if isinstance(options, WhisperOptions):
        return WhisperRecognizer(checkpoint, options)
    kind = ChunkedRecognizer if checkpoint.model.config.encoder.chunk else RedecodingRecognizer
    return kind(checkpoint, options)


class LiveSession:
    """State of a stream, for a caller that reads it: give each piece to `piece`, then call `end`.

    `buffer`: samples from `first` on, those of the current utterance or the `prefix_padding`. `now`: end of the last
    frame with a speech probability; decisions are made only there, so they do not depend on how the samples arrive.
    `begin`: first sample of the current utterance, None in silence; `spoken`: end of its speech; `shown`: end of its
    last partial."""

    def __init__(self, checkpoint: Checkpoint, options: LiveOptions, reader: PcmReader):
        self.checkpoint, self.options, self.reader = checkpoint, options, reader
        whisper = isinstance(checkpoint.model, Whisper)
        self.tokenizer = model_and_tokenizer(checkpoint)[1] if whisper else tokenizer_of(checkpoint)
        window = STRIDE * checkpoint.model.config.encoder.context * HOP if whisper else math.inf  # it hears no more
        self.longest = min(options.longest * RATE, window)  # samples
        self.detector = SpeechDetector()
        self.buffer = torch.zeros(0, dtype=torch.float32, device="cpu")
        self.first = self.now = self.samples = 0
        self.begin: int | None = None
        self.spoken = self.shown = 0
        self.recognizer: Recognizer | None = None
        self.previous: list[str] | None = None  # words of the last partial
        self.latencies: dict[str, list[float]] = {"partial": [], "final": []}

    def events(self) -> Iterator[Event]:
        work, arrived = 0.0, monotonic()
        for piece in self.reader:
            began, arrived = monotonic(), piece.arrived
            for event in self.piece(piece):
                work += monotonic() - began
                yield event
                began = monotonic()
            work += monotonic() - began
        began = monotonic()
        yield from self.end(arrived)
        yield self._summary(work + monotonic() - began)

    def piece(self, piece: PcmChunk) -> Iterator[Event]:
        """Events of the next samples."""
        self.buffer = torch.cat([self.buffer, piece.samples])
        self.samples += len(piece.samples)
        self.detector.push(piece.samples)
        for probability in self.detector.take():
            self.now += FRAME
            yield from self._frame(probability, piece.arrived)

    def end(self, arrived: float) -> Iterator[Event]:
        """Events of the rest, when no more samples come."""
        if missing := -self.samples % FRAME:
            self.detector.push(torch.zeros(missing, dtype=torch.float32, device="cpu"))
        for probability in self.detector.take():
            self.now = self.samples
            yield from self._frame(probability, arrived)
        if self.begin is not None:
            yield from self._final(self.samples, arrived)

    def _frame(self, probability: float, arrived: float) -> Iterator[Event]:
        """Process one more FRAME of audio, up to `now`."""
        o = self.options
        padding = round(o.prefix_padding * RATE)
        if self.begin is None and probability >= o.threshold:
            self._start(max(self.first, self.now - FRAME - padding))
            self.spoken = self.now
        if self.begin is None:
            self._forget(self.now - padding)
            return
        if probability >= max(o.threshold - 0.15, min(o.threshold, 0.01)):
            self.spoken = self.now
        if self.now - self.spoken >= o.silence * RATE:
            yield from self._final(self.now, arrived)
            self.begin = None
        elif self.now - self.begin >= self.longest:
            yield from self._final(self.begin + _quietest(self._wave(self.now)), arrived)
            self.begin = None
            if self.spoken > self.first:  # speech continues after the cut
                self._start(self.first)
        elif self.now - self.shown >= o.step * RATE and (self.previous is None or self.reader.waiting() <= o.step):
            yield from self._partial(arrived)

    def _start(self, begin: int) -> None:
        self.begin, self.shown, self.previous = begin, begin, None
        self.recognizer = new_recognizer(self.checkpoint, self.options.decode)
        self._forget(begin)

    def _forget(self, before: int) -> None:
        if before > self.first:
            self.buffer, self.first = self.buffer[before - self.first :].clone(), before

    def _wave(self, end: int) -> Float[Tensor, "T"]:
        return self.buffer[self.begin - self.first : end - self.first]

    def _partial(self, arrived: float) -> Iterator[Event]:
        decoded = self.recognizer.partial(self._wave(self.now))
        self.shown = self.now
        words = self.tokenizer.decode(decoded.ids).split()
        if words or self.previous:
            agreed = _common(self.previous or [], words)
            self.previous = words
            yield self._event("partial", decoded, " ".join(words), arrived, " ".join(words[:agreed]))

    def _final(self, end: int, arrived: float) -> Iterator[Event]:
        decoded = self.recognizer.final(self._wave(end))
        rejected = isinstance(self.options.decode, SpeechDecodingOptions) and rejection(decoded, self.options.decode)
        text = "" if rejected else " ".join(self.tokenizer.decode(decoded.ids).split())
        if text or self.previous:  # an empty line retracts the partial
            yield self._event("final", decoded, text, arrived, text)
        self._forget(end)

    def _event(
        self, kind: Literal["partial", "final"], decoded: WindowTranscript, text: str, arrived: float, stable: str
    ) -> Event:
        begin = self.begin / RATE
        start, end = (decoded.words[0].start, decoded.words[-1].end) if decoded.words else (0.0, 0.0)
        latency = monotonic() - arrived
        self.latencies[kind].append(latency)
        return Event(kind, text, begin + start, begin + end, latency, stable)

    def _summary(self, work: float) -> Event:
        seconds = self.samples / RATE
        both = self.latencies["partial"] + self.latencies["final"]
        figures = {"seconds": seconds, "real_time_factor": work / max(seconds, 1 / RATE)}
        figures |= {f"{kind}s": float(len(own)) for kind, own in self.latencies.items()}
        figures |= _quantiles("latency", both) | _quantiles("final_latency", self.latencies["final"])
        return Event("summary", "", 0.0, seconds, 0.0, figures=figures)


def _quietest(wave: Float[Tensor, "T"]) -> int:
    """The sample at which to cut a full utterance."""
    meter = LevelMeter()
    meter.push(wave)
    powers = meter.levels()[1]
    return cut(powers, 0, len(powers), len(powers) - 1)[0][1] * HOP


def _common(previous: list[str], words: list[str]) -> int:
    """Length of the common prefix."""
    pairs = zip(previous, words, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    """p50, p95 and max; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    p50, p95 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.95))
    return {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_max": ordered[-1]}
