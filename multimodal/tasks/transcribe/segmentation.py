"""Segmentation of a recording: clips, the speech in them, and cuts at quiet places where a piece is too long."""

from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.transcribe.options import SpeechOptions
from multimodal.tasks.transcribe.timeline import FRAMES_PER_SECOND, Span, gaps
from multimodal.tasks.transcribe.vad import SpeechDetector, speech_spans, speech_windows
from multimodal.tokens.audio.log_mel import HOP, RATE

# Whisper spends as long on a window with little speech as on a full one, and was trained on pauses of this length.
LONGEST_PAUSE = 4 * RATE  # longest pause within a window
QUIET = 30  # frames of the smoothing window in the search for a quiet place
Clip = tuple[int, int]  # mel frames [start, stop)


class LevelMeter:
    """Levels of each mel frame of a stream and, with `vad`, its speech probabilities, found on `device`."""

    def __init__(self, vad: bool = False, device: torch.device | str = "cpu"):
        self.detector = SpeechDetector(device) if vad else None
        self._rest = torch.zeros(0, dtype=torch.float32, device="cpu")
        # one growing buffer each: small tensors kept between large temporary ones would fragment the heap
        self._peaks, self._powers = array("f"), array("f")

    def push(self, samples: Float[Tensor, "_"]) -> None:
        if self.detector is not None:
            self.detector.push(samples)
        samples = torch.cat([self._rest, samples])
        whole = len(samples) // HOP * HOP
        frames, self._rest = samples[:whole].unflatten(0, (-1, HOP)), samples[whole:].clone()
        self._peaks.frombytes(frames.abs().amax(1).numpy().tobytes())
        self._powers.frombytes(frames.square().mean(1).numpy().tobytes())

    def levels(self) -> tuple[Float[Tensor, "F"], Float[Tensor, "F"]]:
        """Peak and mean power of each whole frame."""
        return tuple(torch.tensor(one, dtype=torch.float32, device="cpu") for one in (self._peaks, self._powers))

    def speech(self, options: SpeechOptions, samples: int, longest: int | None) -> list[Clip] | None:
        """Speech in a recording of `samples` samples, in pieces of at most `longest` frames if given; None without
        voice activity detection."""
        if self.detector is None:
            return None
        probabilities = self.detector.probabilities()
        if longest is None:
            spans = speech_spans(probabilities, samples, options.vad())
        else:
            spans = speech_windows(probabilities, samples, options.vad(), longest * HOP, LONGEST_PAUSE)
        return [(round(start / HOP), round(stop / HOP)) for start, stop in spans]


def plan(options: SpeechOptions, content: int, speech: Sequence[Clip] | None) -> tuple[list[Clip], list[Span]]:
    """The clips to transcribe of a recording of `content` frames (`clip_timestamps`, restricted to `speech` if given)
    and the spans skipped."""
    points = [min(content, round(time * FRAMES_PER_SECOND)) for time in options.clip_timestamps]
    points += [content] * (len(points) % 2)
    clips = [(start, stop) for start, stop in zip(points[::2], points[1::2], strict=True) if start < stop]
    skipped = gaps(clips, 0, content, "clip")
    if speech is not None:
        inside = [[(max(a, start), min(b, stop)) for a, b in speech if a < stop and b > start] for start, stop in clips]
        skipped += [gap for clip, own in zip(clips, inside, strict=True) for gap in gaps(own, *clip, "silence")]
        clips = [piece for own in inside for piece in own if piece[0] < piece[1]]
    return clips, [Span(gap.start * HOP, gap.stop * HOP, gap.reason) for gap in skipped]


def cut(powers: Float[Tensor, "F"], start: int, stop: int, longest: int) -> list[Clip]:
    """Cut frames [start, stop) into pieces of at most `longest`, each at the quietest place of its second half."""
    pieces = []
    while stop - start > longest:
        half = start + longest // 2
        width = min(QUIET, start + longest - half)
        smooth = powers[half : start + longest].unfold(0, width, 1).mean(-1)
        end = half + int(smooth.argmin()) + width // 2
        pieces.append((start, end))
        start = end
    return [*pieces, (start, stop)]
