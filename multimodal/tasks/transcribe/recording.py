"""A recording read in a stream, as often as needed: a survey of the whole, then windows or clips of it in order.

No function here holds the sound or the mel of the whole recording: memory does not grow with its length.
"""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.audio.levels import Levels
from multimodal.tokens.audio.log_mel import HOP, RATE, WINDOW, log10_mel, scaled_mel
from multimodal.tokens.audio.offset import without_offset
from multimodal.tokens.audio.reading import Damage, OddAudio, stream_audio

CHUNK = 30 * RATE
FLOOR = -10.0  # log10 mel power of digital silence
AHEAD = WINDOW // 2  # a mel frame is centred: samples before its 10 ms step


class Recording:
    """A file, its bytes, or mono samples [T] at 16 kHz, which every pass reads anew from the start.

    `channel` (0-based) takes that channel alone, `audio_track` and `on_truncated` are those of `stream_audio`. The
    first whole pass warns of damage and of what is odd, later ones do not. `damage` holds what the last whole pass
    found. AudioError: samples that are no finite row of floats."""

    def __init__(
        self, source: str | Path | bytes | Tensor, *, channel: int | None = None, on_truncated: str = "warn",
        audio_track: int | None = None,
    ):  # fmt: skip
        self.source, self.channel, self.on_truncated, self.track = source, channel, on_truncated, audio_track
        self.damage: list[Damage] = []
        self.warned = False
        if isinstance(source, Tensor):
            self.name, self.source = "<samples>", _checked(source)
            if channel:
                raise UsageError(f"channel {channel}: samples have one channel, 0")
            if (audio_track or 1) != 1:
                raise UsageError(f"audio_track {audio_track}: samples are one track, 1")
        else:
            self.name = "<bytes>" if isinstance(source, bytes) else str(source).replace("\n", "\\n")

    def chunks(self) -> Iterator[Float[Tensor, "_"]]:
        """Pieces of 30 s (the last one shorter), which join up to the whole."""
        if isinstance(self.source, Tensor):
            yield from self.source.split(CHUNK)
            return
        damage, remarks = [], []
        how = "ignore" if self.warned and self.on_truncated == "warn" else self.on_truncated
        seconds = CHUNK / RATE
        which = {"channel": self.channel, "audio_track": self.track}
        yield from stream_audio(self.source, RATE, seconds, how, damage=damage, remarks=remarks, **which)
        for text in [] if self.warned else remarks:
            warnings.warn(OddAudio(text), stacklevel=2)
        self.damage, self.warned = damage, True


def _checked(wave: Tensor) -> Float[Tensor, "_"]:
    if wave.ndim != 1 or not wave.is_floating_point():
        raise AudioError(f"samples: must be one row of floats (shape {list(wave.shape)}, {wave.dtype})")
    if not wave.numel():
        raise AudioError("samples: there are none (0)")
    if not wave.isfinite().all():
        raise AudioError(f"samples: {int((~wave.isfinite()).sum())} of {wave.numel()} are not finite")
    wave = wave.detach().float().cpu()

    def seconds() -> Iterator[tuple[int, np.ndarray]]:
        return ((RATE, part[None].numpy()) for part in wave.split(RATE))

    levels = Levels()
    clean = [sound[0] for _, sound in without_offset(seconds(), seconds, levels)]
    return torch.from_numpy(np.concatenate(clean)) if levels.offset else wave


@runtime_checkable
class Detector(Protocol):
    """What a survey needs of a `vad.SpeechDetector`."""

    def push(self, samples: Tensor) -> None: ...

    def probabilities(self) -> Tensor: ...


class Survey(NamedTuple):
    """What a pass over the whole recording tells. `samples`: its length at 16 kHz. `mel_peak`: the largest log10 mel
    power. `vad`: a speech probability for each 512 samples. `windows`: (first sample, samples) spread over it."""

    samples: int
    mel_peak: float | None
    vad: Tensor | None
    windows: list[tuple[int, Tensor]]


@torch.inference_mode()
def survey(
    recording: Recording, *, bands: int | None = None, detector: Detector | None = None, windows: int = 0,
    size: int = 30 * RATE,
) -> Survey:  # fmt: skip
    """One pass: the peak of the mel with `bands` bands, the `detector`'s probabilities, and `windows` pieces of `size`
    samples, evenly spread: between half of that number and all of it, as far as the recording holds so many. The last
    piece may be shorter, yet not below half a piece unless it is the only one."""
    samples, peak, tail, kept = 0, FLOOR, None, _Spread(windows, size)
    for chunk in recording.chunks():
        samples += len(chunk)
        kept.push(chunk)
        if detector is not None:
            detector.push(chunk)
        if bands is not None:
            sound = _reflected(chunk) if tail is None else torch.cat([tail, chunk])
            frames = max(0, (len(sound) - WINDOW) // HOP + 1)
            peak = max(peak, _peak(sound, bands))
            tail = sound[frames * HOP :].clone()
    if bands is not None and tail is not None:
        peak = max(peak, _peak(F.pad(tail, (0, WINDOW)), bands))
    vad = None if detector is None else detector.probabilities()
    return Survey(samples, None if bands is None else peak, vad, kept.windows())


def _reflected(start: Float[Tensor, "_"]) -> Float[Tensor, "_"]:
    """The recording's begin with the 200 samples that the first centred frame sees before it."""
    mirrored = F.pad(start, (0, max(0, AHEAD + 1 - len(start))))[1 : AHEAD + 1].flip(0)
    return torch.cat([mirrored, start])


def _peak(sound: Float[Tensor, "_"], bands: int) -> float:
    return log10_mel(sound, bands).amax().item() if len(sound) >= WINDOW else FLOOR


class _Spread:
    """Pieces 0, s, 2s … of a stream of unknown length: s doubles when they become more than `count`."""

    def __init__(self, count: int, size: int):
        self.count, self.size, self.stride = count, size, 1
        self.kept: dict[int, Tensor] = {}
        self.parts: list[Tensor] = []
        self.filled = self.piece = 0

    def push(self, chunk: Tensor) -> None:
        while self.count and len(chunk):
            part, chunk = chunk.split_with_sizes([n := min(len(chunk), self.size - self.filled), len(chunk) - n])
            self.filled += n
            if self.piece % self.stride == 0:
                self.parts.append(part)
            if self.filled == self.size:
                self._close()

    def _close(self) -> None:
        if self.parts:
            self.kept[self.piece] = torch.cat(self.parts).clone()
        if len(self.kept) > self.count:
            self.stride *= 2
            self.kept = {piece: sound for piece, sound in self.kept.items() if piece % self.stride == 0}
        self.parts, self.filled, self.piece = [], 0, self.piece + 1

    def windows(self) -> list[tuple[int, Tensor]]:
        if self.parts and (not self.kept or self.filled >= self.size / 2):
            self._close()
        return [(piece * self.size, sound) for piece, sound in sorted(self.kept.items())]


class _Samples:
    """Spans of a recording in rising order; holds about one span and one chunk. One that lies before the last one's
    begin is read from the start again."""

    def __init__(self, recording: Recording):
        self.recording = recording
        self._rewind()

    def _rewind(self) -> None:
        self.chunks, self.held, self.first, self.end = self.recording.chunks(), [], 0, 0

    def span(self, start: int, stop: int) -> Float[Tensor, "_"]:
        """Samples [start, stop), fewer where the recording ends."""
        if start < self.first:
            self._rewind()
        while self.end < stop and (chunk := next(self.chunks, None)) is not None:
            self.held.append(chunk)
            self.end += len(chunk)
            self._drop(start)
        self._drop(start)
        joined = torch.cat([torch.zeros(0), *self.held])
        return joined[max(0, start - self.first) : max(0, stop - self.first)]

    def _drop(self, start: int) -> None:
        while self.held and self.first + len(self.held[0]) <= start:
            self.first += len(self.held.pop(0))


class MelReader:
    """Whisper's mel of a whole recording, window by window in rising order. `peak` and `samples` are a survey's."""

    def __init__(self, recording: Recording, bands: int, peak: float, samples: int):
        self.bands, self.peak, self.samples = bands, peak, samples
        self.frames = samples // HOP
        self.recording, self.source = recording, _Samples(recording)

    @torch.inference_mode()
    def window(self, seek: int, count: int) -> Float[Tensor, "M F"]:
        """Mel frames [seek, seek + count) as `log_mel` of the recording with silence behind has them.

        A seek below an earlier one reads the recording from its start again. AudioError: the recording is shorter
        than at its survey."""
        start, stop = seek * HOP - AHEAD, (seek + count - 1) * HOP - AHEAD + WINDOW
        if start >= self.samples:  # silence only, nothing to read
            return scaled_mel(torch.full((self.bands, count), FLOOR), self.peak)
        sound = self.source.span(max(0, start), max(stop, AHEAD + 1))
        if max(0, start) + len(sound) < min(stop, self.samples):
            raise AudioError(f"{self.recording.name}: changed while it was read ({self.samples} samples before)")
        if start < 0:
            sound = _reflected(sound)[start + AHEAD :]
        return scaled_mel(log10_mel(F.pad(sound, (0, stop - start - len(sound))), self.bands), self.peak)


def cut(recording: Recording, clips: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Float[Tensor, "_"]]]:
    """(first sample, samples) of each clip [start, stop) in one pass, clips in rising order of their starts. One that
    reaches past the recording's end is shortened, one that begins there is left out."""
    source = _Samples(recording)
    for start, stop in clips:
        sound = source.span(start, stop)
        if len(sound):
            yield start, sound.clone()
