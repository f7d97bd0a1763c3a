"""Audio of any kind as mono float32 samples, read in a stream: memory does not grow with the length.

PyAV opens containers (`tracks.py`) and decodes them, no ffmpeg program is needed; `offset.py` subtracts a DC offset and
`mono.py` mixes and resamples. A missing file, no audio, samples that are not finite and an early end are errors.
"""

import glob
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from multimodal.errors import AudioError, MultimodalError, UsageError
from multimodal.system.walk import matches, walk
from multimodal.tokens.audio.container import ends_inside, promised_seconds
from multimodal.tokens.audio.damage import HOLE_SECONDS, JITTER_SECONDS, TIMELESS, WHOLE, Clock, Damage
from multimodal.tokens.audio.downmix import MonoMixer, Resampler
from multimodal.tokens.audio.levels import SILENT, Levels
from multimodal.tokens.audio.offset import without_offset
from multimodal.tokens.audio.packets import tell_place
from multimodal.tokens.audio.tracks import check_plausible, check_rate, number_of, numbered, opened, tracks_of

SAMPLE_RATE = 16000
AUDIO = "wav w64 flac mp3 ogg oga opus m4a m4b aac mka aif aiff aifc caf au amr wma"
VIDEO = "mp4 m4v mov webm mkv 3gp avi mpg mpeg"
SUFFIXES = {f".{name}" for name in f"{AUDIO} {VIDEO}".split()}
# Frames of a codec hold 10-100 ms; the mix and the resampler are called for about this much at once.
GATHER_SECONDS = 1.0
GATHER_MOST = 1 << 24  # samples of all channels, at most


class TruncatedAudio(UserWarning):
    """A recording ends before its header says, or has damaged parts, and the caller asked for what is there."""


class OddAudio(UserWarning):
    """An audio file that can be read, but may not be what its owner takes it for."""


def stream_audio(
    source: str | Path | bytes,
    rate: int = SAMPLE_RATE,
    chunk_seconds: float | int = 30.0,
    on_truncated: str = "error",
    channel: int | None = None,
    damage: list[Damage] | None = None,
    audio_track: int | None = None,
    remarks: list[str] | None = None,
) -> Iterator[Float[Tensor, "T"]]:
    """An audio track of a file (or of a file's bytes) as mono float32 chunks at `rate` Hz, within [-1, 1].

    Joined chunks equal the whole; all but the last have `chunk_seconds`. `audio_track` counts from 1; None takes the
    first one that the file marks as its default, else the first. Antiphase channels do not cancel (`mono.py`);
    `channel` (0-based) gives that one alone, unmixed. A DC offset is subtracted (`offset.py`). `remarks` receives what
    is odd, one line each: other tracks, silence, a very low level, clipping, an offset. What is lost inside (packets
    that fail, holes) is silence of the same length, so that what follows keeps its time, as far as the container tells
    it; `damage` is given each span.
    AudioError, when the reading reaches it: not a readable recording, no sound, NaN or infinite samples. A recording
    that ends more than 0.5 s and 2 % before its header says, or is damaged inside, raises after the last chunk;
    `on_truncated="warn"` gives one TruncatedAudio warning instead, "ignore" none (`damage` tells it).
    """
    if on_truncated not in ("error", "warn", "ignore"):
        raise UsageError(f"on_truncated: must be 'error', 'warn' or 'ignore' ({on_truncated!r})")
    check_rate("rate", rate)
    if not 1 <= chunk_seconds * rate < math.inf:
        raise UsageError(f"rate and chunk_seconds: a chunk must hold a sample (rate {rate}, {chunk_seconds} s)")
    if channel is not None and channel < 0:
        raise UsageError(f"channel: channels are counted from 0 ({channel})")
    if audio_track is not None and (not isinstance(audio_track, int) or audio_track < 1):
        raise UsageError(f"audio_track: must be a whole number, tracks are counted from 1 ({audio_track})")
    if on_truncated == "ignore" and damage is None:
        raise UsageError("on_truncated 'ignore': needs a list for `damage`, which tells what is lost (None)")
    reading = _Reading(source, _name(source), channel, audio_track)
    pieces = _samples(reading, rate, on_truncated, [] if damage is None else damage, [] if remarks is None else remarks)
    return _chunks(pieces, round(chunk_seconds * rate))


def read_audio(
    source: str | Path | bytes,
    rate: int = SAMPLE_RATE,
    max_seconds: float | int | None = None,
    on_truncated: str = "error",
    audio_track: int | None = None,
) -> Float[Tensor, "T"]:
    """`stream_audio` as one tensor; with `max_seconds` only the beginning is read, and only it is checked."""
    if max_seconds is None:
        return torch.cat(list(stream_audio(source, rate, on_truncated=on_truncated, audio_track=audio_track)))
    check_rate("rate", rate)
    if not 1 <= max_seconds * rate < math.inf:
        raise UsageError(f"max_seconds: must hold at least one sample ({max_seconds})")
    return next(stream_audio(source, rate, max_seconds, on_truncated, audio_track=audio_track))


def find_audio(paths: Iterable[str | Path]) -> list[Path]:
    """Files, folders (searched to the bottom but not behind links to folders, known suffixes, no dot files, sorted) and
    globs as a list without repeats.

    A name that is neither folder nor pattern is kept as it is, so that reading it names the fault. Nothing found for
    a folder or a pattern: UsageError.
    """
    found: dict[Path, None] = {}
    for given in paths:
        if not str(given):  # else the current folder
            raise UsageError("audio: an empty name ('')")
        path = Path(given)
        if os.path.isdir(path):  # Path.is_dir raises for a name that is too long, which must not stop the others
            files = [Path(file) for file in walk(str(path), SUFFIXES)]
        elif not os.path.exists(path) and glob.has_magic(str(given)):
            files = [Path(file) for file in matches(str(given)) if Path(file).is_file()]
        else:
            files = [path]
        if not files:
            raise UsageError(f"{given}: no recordings found (0 files)")
        found.update(dict.fromkeys(files))
    if not found:
        raise UsageError("audio: no files given (0)")
    return list(found)


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


def count_channels(source: str | Path | bytes, audio_track: int | None = None) -> int:
    """Channels of an audio track, as its first decoded frame has them. AudioError and tracks as `stream_audio`."""
    import av

    name = _name(source)
    with opened(source, name, audio_track) as (container, stream, _):
        for packet in container.demux(stream):
            with suppress(av.error.FFmpegError):
                for frame in packet.decode():
                    check_plausible(name, frame.sample_rate, frame.layout.nb_channels)
                    return frame.layout.nb_channels
    raise AudioError(f"{name}: no sound in it (0 samples)")


def _name(source: str | Path | bytes) -> str:
    return "<bytes>" if isinstance(source, bytes) else str(source).replace("\n", "\\n")


class _Reading(NamedTuple):
    """What is read, and may be read again."""

    source: str | Path | bytes
    name: str
    channel: int | None = None
    track: int | None = None

    def pieces(self) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
        """About a second at once, as decoded."""
        with opened(self.source, self.name, self.track) as (container, stream, file):
            clock = _clock(self.name, container, stream, file)
            yield from _gathered(_sounds(container, stream, file, clock), clock, self.channel)

    def scale(self) -> float:
        """How much longer the losses are than their bytes tell: in mp3 of varying bit rate the promise decides."""
        with opened(self.source, self.name, self.track) as (container, stream, file):
            clock = _clock(self.name, container, stream, file)
            for _ in _sounds(container, stream, file, clock):
                pass
        guessed = sum(span.end - span.start for span in clock.lost)
        scale = 1 + (clock.promised - clock.seconds) / guessed if guessed else 1.0
        return scale if 0.5 < scale < 2 else 1.0

    def speaking(self, count: int, silent: int) -> int | None:
        """The first of `count` tracks that is not silent, where track `silent` is."""
        for track in range(1, count + 1):
            with suppress(MultimodalError):
                pieces = _Reading(self.source, self.name, None, track).pieces() if track != silent else ()
                if any(np.abs(sound).max() > SILENT for _, sound in pieces):
                    return track
        return None


def _samples(
    reading: _Reading, rate: int, on_truncated: str, damage: list[Damage], remarks: list[str]
) -> Iterator[Float32[np.ndarray, "n"]]:
    """Pieces of the resampled mono sound, then the verdict on how it ended."""
    name, levels, made = reading.name, Levels(), 0
    with opened(reading.source, name, reading.track) as (container, stream, file):
        cut = ends_inside(file)
        clock = _clock(name, container, stream, file)
        if clock.timeless and clock.promised:
            clock.scale = cache(reading.scale)
        pieces = _gathered(_sounds(container, stream, file, clock), clock, reading.channel)
        for piece in _converted(without_offset(pieces, reading.pieces, levels), rate):
            made += len(piece)
            yield np.clip(piece, -1, 1)
        taken, tracks = number_of(container, stream), tracks_of(container)
    if not made:
        raise AudioError(f"{name}: no sound in it (0 samples, {clock.pending} packets failed)")
    problem = clock.finish(cut)
    damage += clock.lost
    remarks += _remarks(reading, levels, taken, tracks)
    if problem and on_truncated == "error":
        raise AudioError(problem)
    if problem and on_truncated == "warn":
        warnings.warn(TruncatedAudio(problem), stacklevel=2)


def _remarks(reading: _Reading, levels: Levels, taken: int, tracks: list[str]) -> list[str]:
    part = "" if reading.channel is None else f"channel {reading.channel + 1}: "
    found = [part + text for text in levels.remarks()]
    if len(tracks) > 1 and not reading.channel:
        which, listed = f"audio track {taken} of {len(tracks)}", numbered(tracks)
        if levels.silent and (other := reading.speaking(len(tracks), taken)):
            found = [f"{which} is silent, track {other} is not, audio_track chooses ({listed})"]
        elif reading.track is None:
            found.append(f"{which} is taken, audio_track chooses ({listed})")
    return [f"{reading.name}: {text}" for text in found]


def _clock(name: str, container, stream, file) -> Clock:
    promised = promised_seconds(container, stream, file)
    length = promised or (container.duration / 1e6 if container.duration else None)
    start = None if stream.start_time is None else float(stream.start_time * stream.time_base)
    timeless = container.format.name in TIMELESS
    pause = JITTER_SECONDS if timeless or stream.codec_context.name.startswith(WHOLE) else HOLE_SECONDS
    return Clock(name, start, length, promised, timeless, pause)


def _sounds(container, stream, file, clock: Clock) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
    """(rate, samples) of each frame, with silence for what is lost; a container that breaks off ends the sound."""
    import av

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
            for frame in frames:
                check_plausible(clock.name, frame.sample_rate, frame.layout.nb_channels)
            known = known and all(_has_its_planes(frame) for frame in frames)
        except av.error.FFmpegError:
            known = False
        frames = frames if known else []
        clock.packet(known)
        for frame in frames:
            sound, rate = _planar(frame, clock.name), frame.sample_rate
            time = None if frame.pts is None else frame.pts * tick
            silent = round(clock.frame(time, frame.samples / rate) * rate)
            for start in range(0, silent, rate):
                yield rate, np.zeros((len(sound), min(rate, silent - start)), np.float32)
            yield rate, sound


def _gathered(
    sounds: Iterator[tuple[int, Float32[np.ndarray, "C n"]]], clock: Clock, channel: int | None
) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
    """(rate, samples) of many frames at once, all of one rate and number of channels."""
    kind, held, count = None, [], 0
    for rate, sound in sounds:
        sound = _channel(sound, channel, clock)
        if held and (rate, len(sound)) != kind:
            yield kind[0], _joined(held, clock)
            held, count = [], 0
        kind = rate, len(sound)
        held.append(sound)
        count += sound.shape[1]
        if count >= GATHER_SECONDS * rate or count * len(sound) >= GATHER_MOST:
            yield rate, _joined(held, clock)
            held, count = [], 0
    if held:
        yield kind[0], _joined(held, clock)


def _converted(
    pieces: Iterable[tuple[int, Float32[np.ndarray, "C n"]]], rate: int
) -> Iterator[Float32[np.ndarray, "n"]]:
    """Pieces to mono at `rate`. A stream that changes rate or channels midway goes on with a new mixer."""
    kind = mixer = resampler = None
    for source_rate, sound in pieces:
        if (source_rate, len(sound)) != kind:
            if kind:
                yield from (resampler.push(mixer.flush()), resampler.flush())
            kind = source_rate, len(sound)
            mixer, resampler = MonoMixer(len(sound), source_rate), Resampler(source_rate, rate)
        yield resampler.push(mixer.mix(sound))
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


def _planar(frame, name: str) -> Float32[np.ndarray, "C n"]:
    """Samples as (channels, samples) float32 with full scale 1, from any PCM type, packed or planar."""
    try:
        sound = frame.to_ndarray()
    except ValueError:  # PyAV's, of integers of 64 bits
        raise AudioError(f"{name}: samples of an unknown kind ({frame.format.name})") from None
    if not frame.format.is_planar:
        sound = sound.reshape(frame.samples, -1).T
    if sound.dtype == np.uint8:
        return (sound.astype(np.float32) - 128) / 128
    if sound.dtype.kind == "i":
        return sound.astype(np.float32) / np.float32(2.0 ** (8 * sound.dtype.itemsize - 1))
    return sound.astype(np.float32, copy=False)


def _joined(held: list[Float32[np.ndarray, "C _"]], clock: Clock) -> Float32[np.ndarray, "C n"]:
    sound = np.concatenate(held, axis=1)
    if not np.isfinite(sound).all():
        value = sound[~np.isfinite(sound)][0]
        raise AudioError(f"{clock.name}: not a finite sample within {clock.seconds:.2f} s of the start ({value})")
    return sound
