"""Streaming access to a recording: a survey of the whole, then windows or clips of it in order.

The samples of recordings, and Whisper's mel, are kept for the second pass up to `KEPT` in all; longer ones are decoded
again, so memory does not grow with their length.
"""

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.system.ahead import Ahead
from multimodal.system.files import source_name
from multimodal.tokens.audio.arrays import Samples, as_audio
from multimodal.tokens.audio.damage import DamagedSpan
from multimodal.tokens.audio.log_mel import HOP, RATE, WINDOW, log10_mel, scaled_mel
from multimodal.tokens.audio.reading import OddAudio, TruncatedAudio, count_channels, stream_audio

CHUNK = 30 * RATE
KEPT = 20 * 60 * RATE  # numbers kept of all open recordings, 77 MB
DECODED_AHEAD = 10  # chunks
FLOOR = -10.0  # log10 mel power of digital silence
AHEAD = WINDOW // 2  # samples that a centred mel frame sees before its 10 ms step


class _Room:
    """Numbers that may still be kept."""

    def __init__(self) -> None:
        self.left, self._lock = KEPT, threading.Lock()

    def take(self, count: int) -> bool:
        with self._lock:
            taken = count <= self.left
            self.left -= count if taken else 0
        return taken

    def give(self, count: int) -> None:
        with self._lock:
            self.left += count


_room = _Room()


class _KeptChunks:
    """Chunks of a pass, samples or mel, for the next ones; given up where there is no room."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] | None = []
        self._taken = [0]
        self._end = weakref.finalize(self, lambda taken: _room.give(taken.pop()), self._taken)

    def add(self, chunk: Tensor) -> None:
        if self.chunks is None:
            return
        if _room.take(chunk.numel()):
            self._taken[0] += chunk.numel()
            self.chunks.append(chunk)
        else:
            self.chunks = None
            self._end()


class _Findings(NamedTuple):
    """Findings of a pass: see `stream_audio`."""

    damage: list[DamagedSpan]
    remarks: list[str]
    faults: list[str]


class AudioSource:
    """A file, its bytes, or samples; every pass reads it from the start.

    `channel` (0-based) selects one channel; `audio_track` and `on_truncated` are those of `stream_audio`. Only the
    first full pass warns of damage and oddities, none if `quiet`. `damage` holds the spans found by the last full
    pass. Raises AudioError, UsageError as `as_audio` does."""

    def __init__(
        self, source: Any, *, channel: int | None = None, on_truncated: str = "warn", audio_track: int | None = None,
        quiet: bool = False,
    ):  # fmt: skip
        self.source = as_audio(source)
        self.channel, self.on_truncated, self.track, self.warned = channel, on_truncated, audio_track, quiet
        self.damage: list[DamagedSpan] = []
        self.name = name_of_audio(self.source)
        self._kept: _KeptChunks | None = None
        self._ahead: tuple[Ahead[Tensor], _Findings] | None = None
        if isinstance(self.source, Samples) and (audio_track or 1) != 1:
            raise UsageError(f"{audio_track}: samples have one track, 1", argument="audio_track")

    def chunks(self) -> Iterator[Float[Tensor, "_"]]:
        """Consecutive chunks of 30 s; the last one may be shorter."""
        if self._kept is not None:
            yield from self._kept.chunks or ()
            return
        ahead, self._ahead = self._ahead, None
        decoded, told = ahead or self._started()
        keeping = None if isinstance(self.source, Samples) else _KeptChunks()
        try:
            for chunk in decoded:
                if keeping is not None:
                    keeping.add(chunk)
                yield chunk
        finally:
            if ahead:
                ahead[0].close()
        if told.faults and self.on_truncated == "error":
            raise AudioError(told.faults[0])
        if told.faults and self.on_truncated == "warn" and not self.warned:
            warnings.warn(TruncatedAudio(told.faults[0]), stacklevel=2)
        for text in [] if self.warned else told.remarks:
            warnings.warn(OddAudio(text), stacklevel=2)
        self.damage, self.warned = told.damage, True
        self._kept = keeping if keeping is not None and keeping.chunks is not None else None

    def _started(self) -> tuple[Iterator[Tensor], "_Findings"]:
        """A pass, with what it fills."""
        told = _Findings([], [], [])
        if isinstance(self.source, Samples):
            return self.source.stream(CHUNK / RATE, self.channel, told.remarks), told
        options = {"channel": self.channel, "audio_track": self.track, **told._asdict()}
        return stream_audio(self.source, RATE, CHUNK / RATE, "ignore", **options), told

    def read_ahead(self) -> None:
        """Start to decode a file for the first pass in a thread, some minutes ahead of it."""
        if not isinstance(self.source, Samples):
            decoded, told = self._started()
            self._ahead = Ahead(decoded, DECODED_AHEAD), told

    def close(self) -> None:
        """Drop what is kept, and end the thread that reads ahead."""
        self._kept = None
        if self._ahead is not None:
            self._ahead[0].close()
            self._ahead = None

    def count_channels(self) -> int:
        if isinstance(self.source, Samples):
            return len(self.source.channels)
        return count_channels(self.source, self.track)


def name_of_audio(source: Any) -> str:
    """Path, or the kind of a source without one, on one line."""
    if isinstance(source, str | os.PathLike):
        return source_name(source)
    return "<bytes>" if isinstance(source, bytes) else "<samples>"


class AudioSurvey(NamedTuple):
    """Facts about a whole recording: `samples` at 16 kHz, `mel_peak` (the largest log10 mel power), `windows` (first
    sample, samples) spread over it, and where there was room its `mel` (log10 power [M F])."""

    samples: int
    mel_peak: float | None
    windows: list[tuple[int, Tensor]]
    mel: _KeptChunks | None = None


@inference_mode()
def survey(
    source: AudioSource, *, bands: int | None = None, push: Callable[[Tensor], None] | None = None, windows: int = 0,
    size: int = 30 * RATE, device: torch.device | str = "cpu",
) -> AudioSurvey:  # fmt: skip
    """Read a recording once: compute its mel with `bands` bands on `device`, pass each chunk to `push`, and keep evenly
    spread windows of `size` samples.

    Keeps between half of `windows` and all of them if the recording is long enough. The last window may be shorter,
    but not by more than half unless it is the only one."""
    samples, peaks, tail, spread, mel = 0, list[Tensor](), None, _Spread(windows, size), _KeptChunks()

    def measure(wave: Tensor) -> None:
        if len(wave) >= WINDOW:
            mel.add(made := log10_mel(wave.to(device), bands))
            peaks.append(made.amax())

    for chunk in source.chunks():
        samples += len(chunk)
        spread.push(chunk)
        if push is not None:
            push(chunk)
        if bands is not None:
            padded = _reflected(chunk) if tail is None else torch.cat([tail, chunk])
            frames = max(0, (len(padded) - WINDOW) // HOP + 1)
            measure(padded)
            tail = padded[frames * HOP :].clone()
    if tail is not None:
        measure(F.pad(tail, (0, WINDOW)))
    # read at the end, so that a GPU works while chunks are decoded
    found = [FLOOR, *(torch.stack(peaks).tolist() if peaks else ())]
    if bands is None:
        return AudioSurvey(samples, None, spread.windows())
    return AudioSurvey(samples, max(found), spread.windows(), None if mel.chunks is None else mel)


def _reflected(start: Float[Tensor, "_"]) -> Float[Tensor, "_"]:
    """The beginning of a recording after the 200 reflected samples that its first centred frame sees."""
    mirrored = F.pad(start, (0, max(0, AHEAD + 1 - len(start))))[1 : AHEAD + 1].flip(0)
    return torch.cat([mirrored, start])


class _Spread:
    """Pieces 0, s, 2s … of a stream of unknown length; s doubles when there are more than `count`."""

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
            self.kept = {piece: samples for piece, samples in self.kept.items() if piece % self.stride == 0}
        self.parts, self.filled, self.piece = [], 0, self.piece + 1

    def windows(self) -> list[tuple[int, Tensor]]:
        if self.parts and (not self.kept or self.filled >= self.size / 2):
            self._close()
        return [(piece * self.size, samples) for piece, samples in sorted(self.kept.items())]


class _Samples:
    """Spans of a recording in ascending order; buffers about one span and one chunk. A span that begins before the
    buffer is read from the start again."""

    def __init__(self, source: AudioSource):
        self.source = source
        self._rewind()

    def _rewind(self) -> None:
        self.chunks, self.buffer, self.first, self.end = self.source.chunks(), [], 0, 0

    def span(self, start: int, stop: int) -> Float[Tensor, "_"]:
        """Samples [start, stop), fewer at the end of the recording."""
        if start < self.first:
            self._rewind()
        while self.end < stop and (chunk := next(self.chunks, None)) is not None:
            self.buffer.append(chunk)
            self.end += len(chunk)
            self._drop(start)
        self._drop(start)
        joined = torch.cat([torch.zeros(0, dtype=torch.float32, device="cpu"), *self.buffer])
        return joined[max(0, start - self.first) : max(0, stop - self.first)]

    def _drop(self, start: int) -> None:
        while self.buffer and self.first + len(self.buffer[0]) <= start:
            self.first += len(self.buffer.pop(0))


class MelReader:
    """Whisper's log-mel of a whole recording, window by window, made on `device`. `peak` and `samples` are a survey's,
    and `mel`, if it was kept, which is then not computed again."""

    def __init__(
        self, source: AudioSource, bands: int, peak: float, samples: int, device: torch.device | str = "cpu",
        mel: _KeptChunks | None = None,
    ):  # fmt: skip
        self.bands, self.peak, self.samples, self.device = bands, peak, samples, device
        self.frames = samples // HOP
        self.name, self.spans, self.mel = source.name, _Samples(source), mel

    @inference_mode()
    def window(self, seek: int, count: int) -> Float[Tensor, "M F"]:
        """Mel frames [seek, seek + count), equal to `log_mel` of the recording followed by silence.

        A seek below an earlier one reads the recording again, unless its mel was kept. Raises AudioError if the
        recording has become shorter since its survey."""
        if seek * HOP - AHEAD >= self.samples:  # silence, nothing to read
            silence = torch.full((self.bands, count), FLOOR, dtype=torch.float32, device=self.device)
            return scaled_mel(silence, self.peak)
        return scaled_mel(self._computed(seek, count) if self.mel is None else self._kept(seek, count), self.peak)

    def _kept(self, seek: int, count: int) -> Float[Tensor, "M F"]:
        parts, first = [], 0
        for part in self.mel.chunks:
            frames = part.shape[-1]
            parts.append(part[:, max(0, seek - first) : max(0, seek + count - first)])
            first += frames
        log = torch.cat(parts, dim=-1)
        return F.pad(log, (0, count - log.shape[-1]), value=FLOOR)

    def _computed(self, seek: int, count: int) -> Float[Tensor, "M F"]:
        start, stop = seek * HOP - AHEAD, (seek + count - 1) * HOP - AHEAD + WINDOW
        wave = self.spans.span(max(0, start), max(stop, AHEAD + 1))
        if max(0, start) + len(wave) < min(stop, self.samples):
            raise AudioError(f"{self.name}: changed while it was read ({self.samples} samples before)")
        if start < 0:
            wave = _reflected(wave)[start + AHEAD :]
        padded = F.pad(wave, (0, stop - start - len(wave))).to(self.device)
        return log10_mel(padded, self.bands)


def clip_waves(source: AudioSource, clips: Iterable[tuple[int, int]]) -> Iterator[tuple[int, Float[Tensor, "_"]]]:
    """Yield (first sample, samples) of each clip [start, stop) in one pass, for clips with ascending starts.

    A clip that extends beyond the recording is shortened, one that begins after it is dropped."""
    samples = _Samples(source)
    for start, stop in clips:
        wave = samples.span(start, stop)
        if len(wave):
            yield start, wave.clone()
