"""Audio files as mono float32 samples, streamed with constant memory.

PyAV opens (`tracks.py`) and decodes containers without an ffmpeg program; `offset.py` subtracts a DC offset;
`downmix.py` mixes and resamples.
"""

import glob
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from multimodal.errors import AudioError, MultimodalError, UsageError
from multimodal.system.files import source_name
from multimodal.system.walk import matches, walk
from multimodal.tokens.audio.container import ends_inside, promised_seconds
from multimodal.tokens.audio.damage import HOLE_SECONDS, JITTER_SECONDS, TIMELESS, WHOLE, DamagedSpan, DecoderClock
from multimodal.tokens.audio.downmix import MonoMixer, Resampler, shares_of
from multimodal.tokens.audio.levels import SILENT, Levels
from multimodal.tokens.audio.offset import without_offset
from multimodal.tokens.audio.packets import ends_in_frame, tell_place
from multimodal.tokens.audio.tracks import check_plausible, check_rate, number_of, numbered, opened, tracks_of
from multimodal.tokens.audio.wav import plain_wav
from multimodal.tokens.demux import VIDEO

SAMPLE_RATE = 16000
AUDIO = "wav w64 flac mp3 mp2 mpa ogg oga opus m4a m4b aac mka weba aif aiff aifc caf au snd amr awb wma ac3 eac3 ec3"
AUDIO += " wv ape tta dsf sph"
STREAMS = "ts mts m2t"  # not among the videos of a folder: TypeScript has these endings, too
SUFFIXES = {f".{name}" for name in f"{AUDIO} {VIDEO} {STREAMS}".split()}
# Frames have 10-100 ms; mixing and resampling take about this much at once.
GATHER_SECONDS = 1.0
GATHER_MOST = 1 << 24  # samples of all channels


# by FFmpeg's names
TYPES = {"u8": np.uint8, "s16": np.int16, "s32": np.int32, "flt": np.float32, "dbl": np.float64}
TYPES |= {f"{name}p": kind for name, kind in TYPES.items()}  # planar


class TruncatedAudio(UserWarning):
    """A recording ends early or is damaged, and the caller accepts that."""


class OddAudio(UserWarning):
    """A readable audio file with something odd: silence, several tracks, a low level."""


def stream_audio(
    source: str | Path | bytes, rate: int = SAMPLE_RATE, chunk_seconds: float | int = 30.0, on_truncated: str = "error",
    channel: int | None = None, damage: list[DamagedSpan] | None = None, audio_track: int | None = None,
    remarks: list[str] | None = None, faults: list[str] | None = None,
) -> Iterator[Float[Tensor, "T"]]:  # fmt: skip
    """Yield an audio track of a file (or of its bytes) as mono float32 chunks [T] at `rate` Hz, within [-1, 1].

    All chunks but the last have `chunk_seconds`. `audio_track` counts from 1 (default: the file's default track, else
    the first). Antiphase channels do not cancel (`downmix.py`); `channel` (from 0) selects one, unmixed. A DC offset is
    subtracted (`offset.py`). `remarks` receives a line for each oddity: other tracks, silence, a low level, clipping,
    an offset. Lost parts (failed packets, gaps) become silence of the same length, as far as the container states it,
    so that later audio keeps its time; `damage` receives the spans.

    Raises AudioError for a recording that is unreadable, empty or not finite; and after the last chunk for one that is
    damaged, ends more than 0.5 s and 2 % early or, where no length is stated, inside a frame: `on_truncated="warn"`
    gives a TruncatedAudio warning instead, "ignore" only fills `damage`, and `faults` with the line.
    """
    if on_truncated not in ("error", "warn", "ignore"):
        raise UsageError(f"on_truncated: must be 'error', 'warn' or 'ignore' (got {on_truncated!r})")
    check_rate("rate", rate)
    if not 1 <= chunk_seconds * rate < math.inf:
        raise UsageError(f"chunk_seconds: must hold at least one sample (got {chunk_seconds} s at {rate} Hz)")
    if channel is not None and channel < 0:
        raise UsageError(f"channel: must be 0 or more (got {channel})")
    if audio_track is not None and (not isinstance(audio_track, int) or audio_track < 1):
        raise UsageError(f"audio_track: must be a whole number from 1 on (got {audio_track})")
    if on_truncated == "ignore" and damage is None:
        raise UsageError("on_truncated 'ignore': needs a list `damage` (got None)")
    reading = _Reading(source, _name(source), channel, audio_track)
    told = ([] if found is None else found for found in (damage, remarks, faults))
    pieces = _samples(reading, rate, on_truncated, *told)
    return chunked(pieces, round(chunk_seconds * rate))


def read_audio(
    source: str | Path | bytes, rate: int = SAMPLE_RATE, max_seconds: float | int | None = None,
    on_truncated: str = "error", audio_track: int | None = None,
) -> Float[Tensor, "T"]:  # fmt: skip
    """`stream_audio` as one tensor. `max_seconds`: read, and check, only the beginning."""
    if max_seconds is None:
        return torch.cat(list(stream_audio(source, rate, on_truncated=on_truncated, audio_track=audio_track)))
    check_rate("rate", rate)
    if not 1 <= max_seconds * rate < math.inf:
        raise UsageError(f"max_seconds: must hold at least one sample (got {max_seconds})")
    return next(stream_audio(source, rate, max_seconds, on_truncated, audio_track=audio_track))


def find_audio(paths: Iterable[str | Path]) -> list[Path]:
    """Expand files, folders (recursive, known suffixes, no dot files, no links to folders, sorted) and globs, without
    repeats. Other names are kept, so that reading them reports the fault. Raises UsageError for a folder or glob
    without recordings.
    """
    unique: dict[Path, None] = {}
    for entry in paths:
        if not str(entry):  # else the current folder
            raise UsageError("audio: an empty name ('')")
        path = Path(entry)
        if os.path.isdir(path):  # Path.is_dir raises for too long names, which must not stop the others
            files = [Path(file) for file in walk(str(path), SUFFIXES)]
        elif not os.path.exists(path) and glob.has_magic(str(entry)):
            files = [Path(file) for file in matches(str(entry)) if Path(file).is_file()]
        else:
            files = [path]
        if not files:
            raise UsageError(f"{entry}: no recordings found (0 files)")
        unique.update(dict.fromkeys(files))
    if not unique:
        raise UsageError("audio: no files given (0)")
    return list(unique)


def chunked(pieces: Iterator[Float32[np.ndarray, "n"]], size: int) -> Iterator[Float[Tensor, "T"]]:
    """Regroup samples into chunks of `size`; the last one may be shorter."""
    parts, count = [], 0
    for piece in pieces:
        while count + len(piece) >= size:
            yield torch.from_numpy(np.concatenate([*parts, piece[: size - count]]))
            parts, count, piece = [], 0, piece[size - count :]
        parts.append(piece)
        count += len(piece)
    if count:
        yield torch.from_numpy(np.concatenate(parts))


def count_channels(source: str | Path | bytes, audio_track: int | None = None) -> int:
    """Channels of an audio track, by its first frame. `audio_track` and AudioError as in `stream_audio`."""
    import av

    name = _name(source)
    with opened(source, name, audio_track) as (container, stream, _):
        for packet in container.demux(stream):
            with suppress(av.error.FFmpegError):
                for frame in packet.decode():
                    check_plausible(name, frame.sample_rate, frame.layout.nb_channels)
                    return frame.layout.nb_channels
    raise AudioError(f"{name}: no audio (0 samples)")


def _name(source: str | Path | bytes) -> str:
    return "<bytes>" if isinstance(source, bytes) else source_name(source)


class _Reading(NamedTuple):
    """A source that may be read again."""

    source: str | Path | bytes
    name: str
    channel: int | None = None
    track: int | None = None

    def pieces(self) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
        """Yield chunks of about a second, as decoded."""
        with opened(self.source, self.name, self.track) as (container, stream, file):
            clock = _clock(self.name, container, stream, file)
            yield from _gathered(_sounds(container, stream, file, clock), clock, self.channel)

    def scale(self) -> float:
        """Factor of losses measured in bytes, for mp3 of variable bit rate, by the promised length."""
        with opened(self.source, self.name, self.track) as (container, stream, file):
            clock = _clock(self.name, container, stream, file)
            for _ in _sounds(container, stream, file, clock):
                pass
        guessed = sum(span.end - span.start for span in clock.lost)
        scale = 1 + (clock.promised - clock.seconds) / guessed if guessed else 1.0
        return scale if 0.5 < scale < 2 else 1.0

    def speaking(self, count: int, silent: int) -> int | None:
        """First of `count` tracks that is not silent, besides track `silent`."""
        for track in range(1, count + 1):
            with suppress(MultimodalError):
                pieces = _Reading(self.source, self.name, None, track).pieces() if track != silent else ()
                if any(np.abs(sound).max() > SILENT for _, sound in pieces):
                    return track
        return None


def _samples(
    reading: _Reading, rate: int, on_truncated: str, damage: list[DamagedSpan], remarks: list[str], faults: list[str]
) -> Iterator[Float32[np.ndarray, "n"]]:
    """Yield resampled mono audio, then report how it ended."""
    name, levels, made = reading.name, Levels(), 0
    if not (reading.channel or (reading.track or 1) > 1) and (wav := plain_wav(reading.source)) is not None:
        pieces = partial(_seconds, *wav)
        for piece in converted(without_offset(pieces(), pieces, levels), rate):
            made += len(piece)
            yield np.clip(piece, -1, 1)
        if not made:
            raise AudioError(f"{name}: no audio (0 samples)")
        remarks += _remarks(reading, levels, 1, ["pcm"])
        return
    with opened(reading.source, name, reading.track) as (container, stream, file):
        cut = ends_inside(file)
        clock = _clock(name, container, stream, file)
        if clock.timeless and clock.promised:
            clock.scale = cache(reading.scale)
        pieces = _gathered(_sounds(container, stream, file, clock), clock, reading.channel)
        shares = shares_of(stream.codec_context.layout)
        for piece in converted(without_offset(pieces, reading.pieces, levels), rate, shares):
            made += len(piece)
            yield np.clip(piece, -1, 1)
        cut = cut or (not clock.promised and ends_in_frame(file, clock.place))
        taken, tracks = number_of(container, stream), tracks_of(container)
    if not made:
        raise AudioError(f"{name}: no audio (0 samples, {clock.pending} packets failed)")
    problem = clock.finish(cut)
    damage += clock.lost
    remarks += _remarks(reading, levels, taken, tracks)
    faults += [problem] if problem else []
    if problem and on_truncated == "error":
        raise AudioError(problem)
    if problem and on_truncated == "warn":
        warnings.warn(TruncatedAudio(problem), stacklevel=2)


def _seconds(rate: int, sound: np.ndarray) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
    return ((rate, as_floats(sound[:, start : start + rate])) for start in range(0, sound.shape[1], rate))


def _remarks(reading: _Reading, levels: Levels, taken: int, tracks: list[str]) -> list[str]:
    part = "" if reading.channel is None else f"channel {reading.channel + 1}: "
    lines = [part + text for text in levels.remarks()]
    if len(tracks) > 1 and not reading.channel:
        which, listed = f"audio track {taken} of {len(tracks)}", numbered(tracks)
        if levels.silent and (other := reading.speaking(len(tracks), taken)):
            lines = [f"{which} is silent, track {other} is not; audio_track selects ({listed})"]
        elif reading.track is None:
            lines.append(f"{which} is used; audio_track selects ({listed})")
    return [f"{reading.name}: {text}" for text in lines]


def _clock(name: str, container, stream, file) -> DecoderClock:
    promised = promised_seconds(container, stream, file)
    length = promised or (container.duration / 1e6 if container.duration else None)
    start = None if stream.start_time is None else float(stream.start_time * stream.time_base)
    timeless = container.format.name in TIMELESS
    pause = JITTER_SECONDS if timeless or stream.codec_context.name.startswith(WHOLE) else HOLE_SECONDS
    return DecoderClock(name, start, length, promised, timeless, pause)


def _sounds(container, stream, file, clock: DecoderClock) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (rate, samples [C n] as decoded) of each frame, with silence for losses; a broken container ends the
    stream."""
    import av

    packets, tick = container.demux(stream), float(stream.time_base or 0)
    checked = (0, 0)  # rate and channels
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except (av.error.FFmpegError, OSError, IndexError):  # IndexError: a stream invented by damage
            clock.broken = True
            return
        known = not clock.timeless or not packet.size or tell_place(packet, tick, file, clock)
        frames = []
        try:
            for frame in packet.decode() if known else ():
                if frame.samples:
                    rate, channels = frame.sample_rate, frame.layout.nb_channels
                    if (rate, channels) != checked:
                        check_plausible(clock.name, rate, channels)
                        checked = rate, channels
                    known = known and (channels <= 8 or _has_its_planes(frame))
                    frames.append((rate, frame))
        except av.error.FFmpegError:
            known = False
        clock.packet(known)
        for rate, frame in frames if known else ():
            sound, pts = _planar(frame, clock.name), frame.pts
            gap = clock.frame(None if pts is None else pts * tick, sound.shape[1] / rate)
            silent = round(gap * rate) if gap else 0
            for start in range(0, silent, rate):
                middle = 128 if sound.dtype == np.uint8 else 0
                yield rate, np.full((len(sound), min(rate, silent - start)), middle, sound.dtype)
            yield rate, sound


def _gathered(
    sounds: Iterator[tuple[int, np.ndarray]], clock: DecoderClock, channel: int | None
) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
    """Join frames of one rate, channel count and type to (rate, samples) of about a second."""
    kind, parts, count = None, [], 0
    for rate, sound in sounds:
        sound = sound if channel is None else _channel(sound, channel, clock)
        if parts and (rate, len(sound), sound.dtype) != kind:
            yield kind[0], _joined(parts, clock)
            parts, count = [], 0
        kind = rate, len(sound), sound.dtype
        parts.append(sound)
        count += sound.shape[1]
        if count >= GATHER_SECONDS * rate or count * len(sound) >= GATHER_MOST:
            yield rate, _joined(parts, clock)
            parts, count = [], 0
    if parts:
        yield kind[0], _joined(parts, clock)


def converted(
    pieces: Iterable[tuple[int, Float32[np.ndarray, "C n"]]], rate: int,
    shares: Float32[np.ndarray, "C"] | None = None,
) -> Iterator[Float32[np.ndarray, "n"]]:  # fmt: skip
    """Convert chunks to mono at `rate`; a change of rate or channels starts a new mixer. `shares`: see `shares_of`."""
    kind = mixer = resampler = None
    for source_rate, sound in pieces:
        if (source_rate, len(sound)) != kind:
            if kind:
                yield from (resampler.push(mixer.flush()), resampler.flush())
            kind = source_rate, len(sound)
            fitting = shares if shares is not None and len(shares) == len(sound) else None
            mixer, resampler = MonoMixer(len(sound), source_rate, fitting), Resampler(source_rate, rate)
        yield resampler.push(mixer.mix(sound))
    if kind:
        yield from (resampler.push(mixer.flush()), resampler.flush())


def _channel(sound: np.ndarray, channel: int, clock: DecoderClock) -> np.ndarray:
    if channel >= len(sound):
        raise UsageError(f"channel {channel}: {clock.name} has {len(sound)} channels (at {clock.seconds:.2f} s)")
    return sound[channel : channel + 1]


def _has_its_planes(frame) -> bool:
    """Return False for frames of more than 8 channels whose planes PyAV would read out of bounds, which crashes."""
    return not frame.format.is_planar or len(frame.planes) == frame.layout.nb_channels


def _planar(frame, name: str) -> np.ndarray:
    """Samples [C, n] of any PCM type, packed or planar, without a copy."""
    kind, count, planes = frame.format.name, frame.samples, frame.planes
    if (known := TYPES.get(kind)) is None:  # 64-bit integers
        raise AudioError(f"{name}: unsupported sample format ({kind})")
    if kind[-1] != "p":
        return np.frombuffer(planes[0], known, count * frame.layout.nb_channels).reshape(count, -1).T
    if len(planes) == 1:
        return np.frombuffer(planes[0], known, count)[None]
    return np.stack([np.frombuffer(plane, known, count) for plane in planes])


def as_floats(sound: np.ndarray) -> Float32[np.ndarray, "C n"]:
    """PCM samples as float32 with full scale 1."""
    if sound.dtype == np.uint8:
        return (sound.astype(np.float32) - 128) / 128
    if sound.dtype.kind == "i":
        made = sound.astype(np.float32)
        made *= np.float32(2.0 ** (1 - 8 * sound.dtype.itemsize))
        return made
    return sound.astype(np.float32, copy=False)


def _joined(parts: list[np.ndarray], clock: DecoderClock) -> Float32[np.ndarray, "C n"]:
    whole = np.concatenate(parts, axis=1)
    sound = as_floats(whole)
    if whole.dtype.kind == "f" and not np.isfinite(sound).all():
        value = sound[~np.isfinite(sound)][0]
        raise AudioError(f"{clock.name}: not a finite sample within {clock.seconds:.2f} s of the start ({value})")
    return sound
