"""Recordings of any kind to mono float32 samples, read in a stream: memory does not grow with the length.

Containers and codecs are PyAV's (no ffmpeg program is needed); the mix to mono and the resampling are `mono.py`'s.
What a reader must hear about is an error: no file, no sound, no finite samples, an end that comes early.
"""

import glob
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.container import FORMATS, ends_inside, promised_seconds, starts_without_index
from multimodal.tokens.damage import HOLE_SECONDS, JITTER_SECONDS, TIMELESS, WHOLE, Clock, Damage
from multimodal.tokens.files import open_media
from multimodal.tokens.mono import MonoMixer, Resampler
from multimodal.tokens.places import tell_place

SAMPLE_RATE = 16000
AUDIO = "wav w64 flac mp3 ogg oga opus m4a m4b aac mka aif aiff aifc caf au amr wma"
VIDEO = "mp4 m4v mov webm mkv 3gp avi mpg mpeg"
SUFFIXES = {f".{name}" for name in f"{AUDIO} {VIDEO}".split()}
# Frames of a codec hold 10-100 ms; the mix and the resampler are called for about this much at once.
GATHER_SECONDS = 1.0


class TruncatedAudio(UserWarning):
    """A recording ends before its header says, or has damaged parts, and the caller asked for what is there."""


def stream_audio(
    source: str | Path | bytes,
    rate: int = SAMPLE_RATE,
    chunk_seconds: float | int = 30.0,
    on_truncated: str = "error",
    channel: int | None = None,
    damage: list[Damage] | None = None,
) -> Iterator[Float[Tensor, "T"]]:
    """The first audio stream of a file (or of a file's bytes) as mono float32 chunks at `rate` Hz, within [-1, 1].

    Joined chunks equal the whole; all but the last have `chunk_seconds`. Antiphase channels do not cancel (`mono.py`);
    `channel` (0-based) gives that one alone, unmixed. What is lost inside (packets that fail, holes) is silence of the
    same length, so that what follows keeps its time, as far as the container tells it; `damage` is given each span.
    AudioError, when the reading reaches it: not a readable recording, no sound, NaN or infinite samples. A recording
    that ends more than 0.5 s and 2 % before its header says, or is damaged inside, raises after the last chunk;
    `on_truncated="warn"` gives one TruncatedAudio warning instead, "ignore" none (`damage` tells it).
    """
    if on_truncated not in ("error", "warn", "ignore"):
        raise UsageError(f"on_truncated: must be 'error', 'warn' or 'ignore' ({on_truncated!r})")
    if rate < 1 or not chunk_seconds * rate >= 1:
        raise UsageError(f"rate and chunk_seconds: a chunk must hold a sample (rate {rate}, {chunk_seconds} s)")
    if channel is not None and channel < 0:
        raise UsageError(f"channel: channels are counted from 0 ({channel})")
    if on_truncated == "ignore" and damage is None:
        raise UsageError("on_truncated 'ignore': needs a list for `damage`, which tells what is lost (None)")
    pieces = _samples(source, rate, on_truncated, channel, [] if damage is None else damage)
    return _chunks(pieces, round(chunk_seconds * rate))


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
        if not str(given):  # else the current folder
            raise UsageError("audio: an empty name ('')")
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


def count_channels(source: str | Path | bytes) -> int:
    """Channels of the first audio stream, as its first decoded frame has them. AudioError as `stream_audio`."""
    import av

    name = _name(source)
    with _opened(source, name) as (container, _):
        for packet in container.demux(container.streams.audio[0]):
            with suppress(av.error.FFmpegError):
                for frame in packet.decode():
                    return frame.layout.nb_channels
    raise AudioError(f"{name}: no sound in it (0 samples)")


def _name(source: str | Path | bytes) -> str:
    return "<bytes>" if isinstance(source, bytes) else str(source).replace("\n", "\\n")


@contextmanager
def _opened(source: str | Path | bytes, name: str) -> Iterator[tuple]:
    """The container, which has an audio stream, and the file below it."""
    import av

    with open_media(source, name, AudioError) as file:
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
            if container.streams.audio[0].codec_context is None:
                raise AudioError(f"{name}: its sound has a codec that cannot be decoded ({container.format.name})")
            yield container, file


def _samples(
    source: str | Path | bytes, rate: int, on_truncated: str, channel: int | None, damage: list[Damage]
) -> Iterator[Float32[np.ndarray, "n"]]:
    """Pieces of the resampled mono sound, then the verdict on how it ended."""
    name = _name(source)
    with _opened(source, name) as (container, file):
        cut = ends_inside(file)
        clock = _clock(name, container, file)
        if clock.timeless and clock.promised:
            clock.scale = cache(partial(_scale, source, name))
        for piece in _converted(_sounds(container, file, clock), rate, clock, channel):
            yield np.clip(piece, -1, 1)
    if not clock.seconds:
        raise AudioError(f"{name}: no sound in it (0 samples, {clock.pending} packets failed)")
    problem = clock.finish(cut)
    damage += clock.lost
    if problem and on_truncated == "error":
        raise AudioError(problem)
    if problem and on_truncated == "warn":
        warnings.warn(TruncatedAudio(problem), stacklevel=2)


def _clock(name: str, container, file) -> Clock:
    stream, promised = container.streams.audio[0], promised_seconds(container, file)
    length = promised or (container.duration / 1e6 if container.duration else None)
    start = None if stream.start_time is None else float(stream.start_time * stream.time_base)
    timeless = container.format.name in TIMELESS
    pause = JITTER_SECONDS if timeless or stream.codec_context.name.startswith(WHOLE) else HOLE_SECONDS
    return Clock(name, start, length, promised, timeless, pause)


def _scale(source: str | Path | bytes, name: str) -> float:
    """How much longer the losses are than their bytes tell: in mp3 of varying bit rate the promise decides."""
    with _opened(source, name) as (container, file):
        clock = _clock(name, container, file)
        for _ in _sounds(container, file, clock):
            pass
    guessed = sum(span.end - span.start for span in clock.lost)
    scale = 1 + (clock.promised - clock.seconds) / guessed if guessed else 1.0
    return scale if 0.5 < scale < 2 else 1.0


def _cause(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]


def _sounds(container, file, clock: Clock) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
    """(rate, samples) of each frame, with silence for what is lost; a container that breaks off ends the sound."""
    import av

    stream = container.streams.audio[0]
    packets, tick = container.demux(stream), float(stream.time_base or 0)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except (av.error.FFmpegError, OSError, IndexError):  # the last: a stream that damage made up
            clock.broken = True
            return
        known = not clock.timeless or not packet.size or tell_place(packet, tick, file, clock)
        try:
            frames = [frame for frame in packet.decode() if frame.samples] if known else []
            known = known and all(_has_its_planes(frame) for frame in frames)
        except av.error.FFmpegError:
            known = False
        frames = frames if known else []
        clock.packet(known)
        for frame in frames:
            sound, rate = _planar(frame), frame.sample_rate
            time = None if frame.pts is None else frame.pts * tick
            silent = round(clock.frame(time, frame.samples / rate) * rate)
            for start in range(0, silent, rate):
                yield rate, np.zeros((len(sound), min(rate, silent - start)), np.float32)
            yield rate, sound


def _converted(
    sounds: Iterator[tuple[int, Float32[np.ndarray, "C n"]]], rate: int, clock: Clock, channel: int | None
) -> Iterator[Float32[np.ndarray, "n"]]:
    """Frames to mono at `rate`. A stream that changes rate or channels midway goes on with a new mixer."""
    kind, held, count = None, [], 0
    mixer = resampler = None

    def push() -> Float32[np.ndarray, "n"]:
        return resampler.push(mixer.mix(_finite(np.concatenate(held, axis=1), clock)))

    for source_rate, sound in sounds:
        sound = _channel(sound, channel, clock)
        if (source_rate, len(sound)) != kind:
            if held:
                yield push()
            if kind:
                yield from (resampler.push(mixer.flush()), resampler.flush())
            kind, held, count = (source_rate, len(sound)), [], 0
            mixer, resampler = MonoMixer(len(sound), source_rate), Resampler(source_rate, rate)
        held.append(sound)
        count += sound.shape[1]
        if count >= GATHER_SECONDS * source_rate:
            yield push()
            held, count = [], 0
    if held:
        yield push()
    if kind:
        yield from (resampler.push(mixer.flush()), resampler.flush())


def _channel(sound: Float32[np.ndarray, "C n"], channel: int | None, clock: Clock) -> Float32[np.ndarray, "D n"]:
    if channel is None:
        return sound
    if channel >= len(sound):
        raise UsageError(f"channel {channel}: {clock.name} has {len(sound)}, counted from 0 (at {clock.seconds:.2f} s)")
    return sound[channel : channel + 1]


def _has_its_planes(frame) -> bool:
    """PyAV counts the planes of more than 8 channels past their list's end; reading those would end the process."""
    channels = frame.layout.nb_channels
    return channels <= 8 or not frame.format.is_planar or len(frame.planes) == channels


def _planar(frame) -> Float32[np.ndarray, "C n"]:
    """Samples as (channels, samples) float32 with full scale 1, from any PCM type, packed or planar."""
    sound = frame.to_ndarray()
    if not frame.format.is_planar:
        sound = sound.reshape(frame.samples, -1).T
    if sound.dtype == np.uint8:
        return (sound.astype(np.float32) - 128) / 128
    if sound.dtype.kind == "i":
        return sound.astype(np.float32) / np.float32(2.0 ** (8 * sound.dtype.itemsize - 1))
    return sound.astype(np.float32, copy=False)


def _finite(sound: Float32[np.ndarray, "C n"], clock: Clock) -> Float32[np.ndarray, "C n"]:
    if not np.isfinite(sound).all():
        value = sound[~np.isfinite(sound)][0]
        raise AudioError(f"{clock.name}: not a finite sample within {clock.seconds:.2f} s of the start ({value})")
    return sound
