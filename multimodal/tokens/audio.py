"""Recordings of any kind to mono float32 samples, read in a stream: memory does not grow with the length.

Containers and codecs are PyAV's (no ffmpeg program is needed); the mix to mono and the resampling are `mono.py`'s.
What a reader must hear about is an error: no file, no sound, no finite samples, an end that comes early.
"""

import glob
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.container import FORMATS, ends_inside_page, promised_seconds, starts_without_index
from multimodal.tokens.files import open_media
from multimodal.tokens.mono import MonoMixer, Resampler

SAMPLE_RATE = 16000
AUDIO = "wav w64 flac mp3 ogg oga opus m4a m4b aac mka aif aiff aifc caf au amr wma"
VIDEO = "mp4 m4v mov webm mkv 3gp avi mpg mpeg"
SUFFIXES = {f".{name}" for name in f"{AUDIO} {VIDEO}".split()}
# Frames of a codec hold 10-100 ms; the mix and the resampler are called for about this much at once.
GATHER_SECONDS = 1.0
# Estimated lengths and codec priming stay below both.
SHORT_SECONDS, SHORT_SHARE = 0.5, 0.02
# A stream cut from a broadcast starts inside a group of dependent packets; a few of them may not decode.
LEADING_PACKETS = 10
# A jump of the container's clock that is no pause: Opus leaves out at most 0.4 s of silence (RFC 7587, DTX).
HOLE_SECONDS = 0.45


class TruncatedAudio(UserWarning):
    """A recording ends before its header says, or has damaged parts, and the caller asked for what is there."""


@dataclass
class _Progress:
    """What has been decoded: seconds of sound, the last end on the container's clock, packets that failed."""

    name: str
    seconds: float = 0.0
    end: float = 0.0
    failed: int = 0
    pending: int = 0
    holes: float = 0.0

    def good(self, frame) -> None:
        if self.seconds or self.pending > LEADING_PACKETS:
            self.failed += self.pending
        self.pending = 0
        length = frame.samples / frame.sample_rate
        start = self.end if frame.time is None else frame.time
        if self.seconds and start - self.end > HOLE_SECONDS:
            self.holes += start - self.end
        self.seconds += length
        self.end = max(self.end, start + length)

    def problem(self, promised: float | None, cut: bool) -> str | None:
        """The one-line complaint, or None. Failed packets after the last good one count only as missing time."""
        missing = (promised or 0) - max(self.seconds, self.end)
        of = f" of {promised:.2f} s" if promised else ""
        if (missing > SHORT_SECONDS and missing > SHORT_SHARE * promised) or cut:
            return f"{self.name}: the recording ends early (got {self.seconds:.2f} s{of})"
        if self.failed:
            return f"{self.name}: damaged, {self.failed} packets cannot be decoded (got {self.seconds:.2f} s{of})"
        if self.holes:
            return f"{self.name}: damaged, {self.holes:.2f} s are missing inside (got {self.seconds:.2f} s{of})"
        return None


def stream_audio(
    source: str | Path | bytes,
    rate: int = SAMPLE_RATE,
    chunk_seconds: float | int = 30.0,
    on_truncated: str = "error",
) -> Iterator[Float[Tensor, "T"]]:
    """The first audio stream of a file (or of a file's bytes) as mono float32 chunks at `rate` Hz, within [-1, 1].

    Joined chunks equal the whole; all but the last have `chunk_seconds`. Antiphase channels do not cancel (`mono.py`).
    AudioError, when the reading reaches it: not a readable recording, no sound, NaN or infinite samples. A recording
    that ends more than 0.5 s and 2 % before its header says, or is damaged inside (packets that fail, a hole of
    0.45 s or more), raises after the last chunk; `on_truncated="warn"` gives one TruncatedAudio warning instead.
    """
    if on_truncated not in ("error", "warn"):
        raise UsageError(f"on_truncated: must be 'error' or 'warn' ({on_truncated!r})")
    if rate < 1 or not chunk_seconds * rate >= 1:
        raise UsageError(f"rate and chunk_seconds: a chunk must hold a sample (rate {rate}, {chunk_seconds} s)")
    return _chunks(_samples(source, rate, on_truncated), round(chunk_seconds * rate))


def read_audio(
    source: str | Path | bytes,
    rate: int = SAMPLE_RATE,
    max_seconds: float | int | None = None,
    on_truncated: str = "error",
) -> Float[Tensor, "T"]:
    """`stream_audio` as one tensor; with `max_seconds` only the beginning is read, and only it is checked."""
    if max_seconds is None:
        return torch.cat(list(stream_audio(source, rate, on_truncated=on_truncated)))
    if not max_seconds * rate >= 1:
        raise UsageError(f"max_seconds: must hold at least one sample ({max_seconds})")
    return next(stream_audio(source, rate, max_seconds, on_truncated))


def find_audio(paths: Iterable[str | Path]) -> list[Path]:
    """Files, folders (searched to the bottom, known suffixes only, sorted) and globs as a list without repeats.

    A name that is neither folder nor pattern is kept as it is, so that reading it names the fault. Nothing found for
    a folder or a pattern: UsageError.
    """
    found: dict[Path, None] = {}
    for given in paths:
        path = Path(given)
        if path.is_dir():
            matches = [file for file in sorted(path.rglob("*")) if _is_audio(file)]
        elif not path.exists() and glob.has_magic(str(given)):
            matches = [Path(file) for file in sorted(glob.glob(str(given), recursive=True)) if Path(file).is_file()]
        else:
            matches = [path]
        if not matches:
            raise UsageError(f"{given}: no recordings found (0 files)")
        found.update(dict.fromkeys(matches))
    if not found:
        raise UsageError("audio: no files given (0)")
    return list(found)


def _is_audio(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and file.is_file()


def _chunks(pieces: Iterator[Float32[np.ndarray, "n"]], size: int) -> Iterator[Float[Tensor, "T"]]:
    held, count = [], 0
    for piece in pieces:
        while count + len(piece) >= size:
            yield torch.from_numpy(np.concatenate([*held, piece[: size - count]]))
            held, count, piece = [], 0, piece[size - count :]
        held.append(piece)
        count += len(piece)
    if count:
        yield torch.from_numpy(np.concatenate(held))


def _samples(source: str | Path | bytes, rate: int, on_truncated: str) -> Iterator[Float32[np.ndarray, "n"]]:
    """Pieces of the resampled mono sound, then the verdict on how it ended."""
    import av

    name = "<bytes>" if isinstance(source, bytes) else str(source).replace("\n", "\\n")
    with open_media(source, name, AudioError) as file:
        cut = ends_inside_page(file)
        try:
            container = av.open(file, options={"format_whitelist": FORMATS}, metadata_errors="ignore")
        except (av.error.FFmpegError, ValueError) as error:
            if starts_without_index(file):
                raise AudioError(f"{name}: the recording ends early (an MP4 without its index, moov)") from None
            raise AudioError(f"{name}: not a recording that can be read ({_cause(error)})") from None
        with container:
            if not container.streams.audio:
                kinds = ", ".join(stream.type for stream in container.streams) or "no streams"
                raise AudioError(f"{name}: no audio stream ({container.format.name}: {kinds})")
            progress = _Progress(name)
            promised = promised_seconds(container, file)
            for piece in _converted(_frames(container, progress), rate, progress):
                yield np.clip(piece, -1, 1)
    if not progress.seconds:
        raise AudioError(f"{name}: no sound in it (0 samples, {progress.pending} packets failed)")
    problem = progress.problem(promised, cut)
    if problem and on_truncated == "error":
        raise AudioError(problem)
    if problem:
        warnings.warn(TruncatedAudio(problem), stacklevel=2)


def _cause(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]


def _frames(container, progress: _Progress) -> Iterator:
    """Decoded frames; packets that fail are counted, and a container that breaks off ends the sound."""
    import av

    packets = container.demux(container.streams.audio[0])
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except av.error.FFmpegError:
            progress.failed += 1
            return
        try:
            frames = packet.decode()
        except av.error.FFmpegError:
            progress.pending += 1
            continue
        for frame in frames:
            if frame.samples:
                progress.good(frame)
                yield frame


def _converted(frames: Iterator, rate: int, progress: _Progress) -> Iterator[Float32[np.ndarray, "n"]]:
    """Frames to mono at `rate`. A stream that changes rate or channels midway goes on with a new mixer."""
    kind, held, count = None, [], 0
    mixer = resampler = None

    def push() -> Float32[np.ndarray, "n"]:
        return resampler.push(mixer.mix(_finite(np.concatenate(held, axis=1), progress)))

    for frame in frames:
        sound = _planar(frame)
        if (frame.sample_rate, len(sound)) != kind:
            if held:
                yield push()
            if kind:
                yield from (resampler.push(mixer.flush()), resampler.flush())
            kind, held, count = (frame.sample_rate, len(sound)), [], 0
            mixer, resampler = MonoMixer(len(sound), frame.sample_rate), Resampler(frame.sample_rate, rate)
        held.append(sound)
        count += sound.shape[1]
        if count >= GATHER_SECONDS * frame.sample_rate:
            yield push()
            held, count = [], 0
    if held:
        yield push()
    if kind:
        yield from (resampler.push(mixer.flush()), resampler.flush())


def _planar(frame) -> Float32[np.ndarray, "C n"]:
    """Samples as (channels, samples) float32 with full scale 1, from any PCM type, packed or planar."""
    sound = frame.to_ndarray()
    if not frame.format.is_planar:
        sound = sound.reshape(frame.samples, -1).T
    if sound.dtype == np.uint8:
        return (sound.astype(np.float32) - 128) / 128
    if sound.dtype.kind == "i":
        return sound.astype(np.float32) / np.float32(2.0 ** (8 * sound.dtype.itemsize - 1))
    return sound.astype(np.float32)


def _finite(sound: Float32[np.ndarray, "C n"], progress: _Progress) -> Float32[np.ndarray, "C n"]:
    if not np.isfinite(sound).all():
        value = sound[~np.isfinite(sound)][0]
        raise AudioError(f"{progress.name}: not a finite sample within {progress.seconds:.2f} s of the start ({value})")
    return sound
