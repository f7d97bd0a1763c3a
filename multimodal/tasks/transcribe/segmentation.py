"""Which parts of a recording are heard: its clips, of these what is speech, cut at quiet places where too long."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.recording import Recording, Survey, survey
from multimodal.tasks.transcribe.timeline import Span, between
from multimodal.tasks.transcribe.whisper.options import SpeechOptions
from multimodal.tokens.audio.log_mel import HOP, RATE

FRAMES_PER_SECOND = RATE // HOP
# A window costs Whisper the same however little is said in it, and it was trained on pauses of this length:
PAUSE = 4 * RATE  # up to which pieces of speech share a window
QUIET = 30  # frames over which the quietest place is looked for
Clip = tuple[int, int]  # mel frames [start, stop)


class Ear:
    """Hears a recording in a survey: how loud each mel frame is, and what a speech detector says."""

    def __init__(self, detector: Any = None):
        self.detector, self.rest = detector, torch.zeros(0)
        # one growing buffer each: small tensors that stay, between large ones that go, would split the heap
        self._peaks, self._powers = array("f"), array("f")

    def push(self, samples: Float[Tensor, "_"]) -> None:
        if self.detector is not None:
            self.detector.push(samples)
        sound = torch.cat([self.rest, samples])
        whole = len(sound) // HOP * HOP
        frames, self.rest = sound[:whole].unflatten(0, (-1, HOP)), sound[whole:].clone()
        self._peaks.frombytes(frames.abs().amax(1).numpy().tobytes())
        self._powers.frombytes(frames.square().mean(1).numpy().tobytes())

    def probabilities(self) -> Tensor:
        return torch.zeros(0) if self.detector is None else self.detector.probabilities()

    def levels(self) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
        """Of each whole frame the largest sample and the mean power."""
        return torch.tensor(self._peaks), torch.tensor(self._powers)


def listen(recording: Recording, options: SpeechOptions, **wanted: Any) -> tuple[Survey, Ear]:
    """A `survey` with what it `wanted`, and what the ear heard."""
    detector = None
    if options.vad_filter:
        from multimodal.tasks.transcribe.vad import SpeechDetector

        detector = SpeechDetector()
    ear = Ear(detector)
    return survey(recording, detector=ear, **wanted), ear


def speech(options: SpeechOptions, found: Survey, longest: int | None) -> list[Clip] | None:
    """Where somebody speaks, in pieces of at most `longest` frames where given; None: it was not looked for."""
    if not options.vad_filter:
        return None
    from multimodal.tasks.transcribe.vad import speech_spans, windows

    if longest is None:
        spans = speech_spans(found.vad, found.samples, options.vad())
    else:
        spans = windows(found.vad, found.samples, options.vad(), longest * HOP, PAUSE)
    return [(round(start / HOP), round(stop / HOP)) for start, stop in spans]


def plan(options: SpeechOptions, content: int, spoken: Sequence[Clip] | None) -> tuple[list[Clip], list[Span]]:
    """The clips that are heard of a recording of `content` frames: those of `clip_timestamps`, of these what is
    spoken. And the account of the rest."""
    points = [min(content, round(time * FRAMES_PER_SECOND)) for time in options.clip_timestamps]
    points += [content] * (len(points) % 2)
    clips = [(start, stop) for start, stop in zip(points[::2], points[1::2], strict=True) if start < stop]
    gaps = between(clips, 0, content, "clip")
    if spoken is not None:
        inside = [[(max(a, start), min(b, stop)) for a, b in spoken if a < stop and b > start] for start, stop in clips]
        gaps += [gap for clip, own in zip(clips, inside, strict=True) for gap in between(own, *clip, "silence")]
        clips = [piece for own in inside for piece in own if piece[0] < piece[1]]
    return clips, [Span(gap.start * HOP, gap.stop * HOP, gap.reason) for gap in gaps]


def cut(powers: Float[Tensor, "F"], start: int, stop: int, longest: int) -> list[Clip]:
    """Frames [start, stop) in pieces of at most `longest`, cut in the second half of each where it is quietest."""
    found = []
    while stop - start > longest:
        half = start + longest // 2
        around = min(QUIET, start + longest - half)
        smooth = powers[half : start + longest].unfold(0, around, 1).mean(-1)
        end = half + int(smooth.argmin()) + around // 2
        found.append((start, end))
        start = end
    return [*found, (start, stop)]
