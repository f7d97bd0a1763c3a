"""Transcription of sound while it comes: partial lines as it is spoken, final ones at its pauses."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.models.whisper import JointConformer
from multimodal.tasks.transcribe.conformer.decode import Heard, JointOptions, tokenizer_of, with_language_model
from multimodal.tasks.transcribe.conformer.windows import LONGEST, unlikely
from multimodal.tasks.transcribe.live_recognizers import Hearing, hearing
from multimodal.tasks.transcribe.segmentation import Ear, cut
from multimodal.tasks.transcribe.vad import FRAME, SpeechDetector
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.audio.pcm import PcmReader, Piece
from multimodal.weights.folder import Checkpoint

BEFORE = 0.4  # seconds heard before the first frame of speech


@dataclass(frozen=True)
class LiveOptions:
    """`rate` of the samples in Hz. A partial line comes after every `step` seconds of speech, a final one after
    `silence` seconds without (speech probability under `threshold` - 0.15) or, cut at a quiet place, when an utterance
    reaches `longest` seconds. `threshold` 0: all is speech. `decode`: of the finals; partials are the CTC best path."""

    rate: int = RATE
    step: float = 0.5
    silence: float = 0.6
    longest: float = LONGEST / RATE
    threshold: float = 0.5
    decode: JointOptions = field(default_factory=JointOptions)

    def __post_init__(self):
        if not 0.1 <= self.step <= self.longest:
            raise UsageError(f"step: must be 0.1 s to the {self.longest:g} s of the longest utterance ({self.step})")
        if not 2 <= self.longest <= 30:
            raise UsageError(f"longest: must be 2 to 30 s ({self.longest})")
        if not 0.1 <= self.silence <= 10:
            raise UsageError(f"silence: must be 0.1 to 10 s ({self.silence})")
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"threshold: must be 0 to 1 ({self.threshold})")


class Event(NamedTuple):
    """A line, from `start` to `end` in seconds of the sound. A partial one holds the utterance so far, of which the
    words in `stable` are as in the partial before; a final one takes the place of the partials since the last final.
    `latency`: seconds from the arrival of the last sample that the line needed until it was out.

    The last event is the "summary", with `figures` (see `run`)."""

    kind: Literal["partial", "final", "summary"]
    text: str
    start: float
    end: float
    latency: float
    stable: str = ""
    figures: dict[str, float] | None = None


def run(read: Callable[[int], bytes], checkpoint: Checkpoint, options: LiveOptions | None = None) -> Iterator[Event]:
    """Lines of a stream of raw mono 16-bit little-endian PCM: `read` as `pcm.PcmReader` takes it.

    A model of chunks is run chunk by chunk, another one hears the going utterance again at each step. Where decoding
    falls behind the sound, only the first partial of an utterance is made. `figures` of the summary: `seconds` of
    sound, `real_time_factor` (seconds at work a second of sound), `partials` and `finals` (their number),
    `latency_p50`, `latency_p95`, `latency_max` of all lines and of the finals alone (`final_latency_…`).

    Raises UsageError for a model without CTC, and as `PcmReader` and `joint_decode.language_model` do."""
    if not isinstance(checkpoint.model, JointConformer):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, live transcription needs one with CTC")
    options = options or LiveOptions()
    # a language model that does not fit is refused before anything is read
    options = replace(options, decode=with_language_model(checkpoint, options.decode))
    return _Live(checkpoint, options, PcmReader(read, options.rate)).events()


class _Detector(SpeechDetector):
    def take(self) -> list[float]:
        """Probabilities of the frames that were filled since the last call."""
        found, self._found = self._found.tolist(), array("f")
        return found


class _Live:
    """`held`: samples from `first` on, those of the going utterance, or of BEFORE it. `now`: the end of the last
    frame whose probability of speech is known; decisions fall at such ends only, so they do not depend on how the
    sound arrives. `begin`: first sample of the going utterance, None in silence; `spoken`: the end of its speech."""

    def __init__(self, checkpoint: Checkpoint, options: LiveOptions, reader: PcmReader):
        self.checkpoint, self.options, self.reader = checkpoint, options, reader
        self.tokenizer, self.detector = tokenizer_of(checkpoint), _Detector()
        self.held, self.first, self.now, self.samples = torch.zeros(0), 0, 0, 0
        self.begin: int | None = None
        self.spoken = self.shown = 0
        self.hearing: Hearing | None = None
        self.last: list[str] | None = None  # words of the partial before
        self.latencies: dict[str, list[float]] = {"partial": [], "final": []}

    def events(self) -> Iterator[Event]:
        work, arrived = 0.0, monotonic()
        for piece in self.reader:
            began, arrived = monotonic(), piece.arrived
            for event in self._piece(piece):
                work += monotonic() - began
                yield event
                began = monotonic()
            work += monotonic() - began
        began = monotonic()
        yield from self._end(arrived)
        yield self._summary(work + monotonic() - began)

    def _piece(self, piece: Piece) -> Iterator[Event]:
        self.held = torch.cat([self.held, piece.samples])
        self.samples += len(piece.samples)
        self.detector.push(piece.samples)
        for probability in self.detector.take():
            self.now += FRAME
            yield from self._frame(probability, piece.arrived)

    def _end(self, arrived: float) -> Iterator[Event]:
        if missing := -self.samples % FRAME:
            self.detector.push(torch.zeros(missing))
        for probability in self.detector.take():
            self.now = self.samples
            yield from self._frame(probability, arrived)
        if self.begin is not None:
            yield from self._final(self.samples, arrived)

    def _frame(self, probability: float, arrived: float) -> Iterator[Event]:
        """What one more FRAME of sound, up to `now`, changes."""
        o = self.options
        if self.begin is None and probability >= o.threshold:
            self._start(max(self.first, self.now - FRAME - round(BEFORE * RATE)))
            self.spoken = self.now
        if self.begin is None:
            self._forget(self.now - round(BEFORE * RATE))
            return
        if probability >= max(o.threshold - 0.15, min(o.threshold, 0.01)):
            self.spoken = self.now
        if self.now - self.spoken >= o.silence * RATE:
            yield from self._final(self.now, arrived)
            self.begin = None
        elif self.now - self.begin >= o.longest * RATE:
            yield from self._final(self.begin + _quietest(self._wave(self.now)), arrived)
            self.begin = None
            if self.spoken > self.first:  # speech goes on after the cut
                self._start(self.first)
        elif self.now - self.shown >= o.step * RATE and (self.last is None or self.reader.waiting() <= o.step):
            yield from self._partial(arrived)

    def _start(self, begin: int) -> None:
        self.begin, self.shown, self.last = begin, begin, None
        self.hearing = hearing(self.checkpoint, self.options.decode)
        self._forget(begin)

    def _forget(self, before: int) -> None:
        if before > self.first:
            self.held, self.first = self.held[before - self.first :].clone(), before

    def _wave(self, end: int) -> Float[Tensor, "T"]:
        return self.held[self.begin - self.first : end - self.first]

    def _partial(self, arrived: float) -> Iterator[Event]:
        heard = self.hearing.partial(self._wave(self.now))
        self.shown = self.now
        words = self.tokenizer.decode(heard.ids).split()
        if words or self.last:
            agreed = _common(self.last or [], words)
            self.last = words
            yield self._event("partial", heard, " ".join(words), arrived, " ".join(words[:agreed]))

    def _final(self, end: int, arrived: float) -> Iterator[Event]:
        heard = self.hearing.final(self._wave(end))
        text = "" if unlikely(heard, self.options.decode) else " ".join(self.tokenizer.decode(heard.ids).split())
        if text or self.last:  # an empty line takes back what was shown
            yield self._event("final", heard, text, arrived, text)
        self._forget(end)

    def _event(self, kind: Literal["partial", "final"], heard: Heard, text: str, arrived: float, stable: str) -> Event:
        begin = self.begin / RATE
        start, end = (heard.words[0].start, heard.words[-1].end) if heard.words else (0.0, 0.0)
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
    """The sample at which a full utterance is cut."""
    ear = Ear()
    ear.push(wave)
    powers = ear.levels()[1]
    return cut(powers, 0, len(powers), len(powers) - 1)[0][1] * HOP


def _common(before: list[str], words: list[str]) -> int:
    """Words at the begin that both have."""
    for count, (a, b) in enumerate(zip(before, words, strict=False)):
        if a != b:
            return count
    return min(len(before), len(words))


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    """Nothing of no values."""
    if not values:
        return {}
    ordered = sorted(values)
    p50, p95 = (ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.95))
    return {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_max": ordered[-1]}
