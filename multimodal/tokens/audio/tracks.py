"""Open audio and video files: allowed demuxers, choice of the audio track, plausibility of its format."""

import ctypes
import errno
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

from multimodal.errors import AudioError, UsageError
from multimodal.system.files import open_media
from multimodal.tokens.audio.container import starts_without_index

# Allowed demuxers. Not playlists and scripts (hls, concat, dash, sdp), which name other files and addresses.
FORMATS = "wav,w64,aiff,au,caf,flac,mp3,ogg,mov,matroska,webm,aac,amr,ac3,eac3,asf,avi,flv,mpeg,mpegts,wv,ape,tta,dsf"
# Not a protocol: FFmpeg reads from our file object and can open nothing by itself.
NO_PROTOCOL = "none"
# Telephones use 8,000 Hz, early sound cards 4,000; DSD512 decodes to 3,072,000.
RATES = (1000, 3072000)
# A false header makes FFmpeg allocate up to 2 GB; tables of hours of audio take a few MB.
MOST_BYTES = 128 << 20
MOST_CHANNELS = 512  # FFmpeg's own limit for WAV


@cache
def _limit_ffmpeg() -> None:
    """Limit FFmpeg's single allocations to `MOST_BYTES`; PyAV has no setting for it."""
    from av.container import core

    with suppress(OSError, AttributeError):
        ctypes.CDLL(core.__file__).av_max_alloc(ctypes.c_size_t(MOST_BYTES))


class _Seeking:
    """File whose `seek` returns FFmpeg's error number: PyAV prints a second exception."""

    def __init__(self, file: io.BufferedIOBase):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return self._file.seek(offset, whence)
        except (OSError, ValueError):  # an offset before the start, from a false header
            return -errno.EINVAL


@contextmanager
def opened(source: str | Path | bytes, name: str, track: int | None = None) -> Iterator[tuple]:
    """Yield the container, its audio stream (`track` counts from 1; None: see `_chosen`) and the file."""
    import av

    _limit_ffmpeg()
    options = {"format_whitelist": FORMATS, "protocol_whitelist": NO_PROTOCOL}
    with open_media(source, name, AudioError) as file:
        try:
            container = av.open(_Seeking(file), options=options, metadata_errors="ignore")
        except (av.error.FFmpegError, ValueError) as error:
            if starts_without_index(file):
                raise AudioError(f"{name}: the recording ends early (an MP4 without its index, moov)") from None
            raise AudioError(f"{name}: not a readable recording ({_cause(error)})") from None
        with container:
            stream = _chosen(container, name, track)
            if rate := stream.codec_context.sample_rate:  # 0 if only the frames state it
                check_plausible(name, rate)
            yield container, stream, file


def _chosen(container, name: str, track: int | None):
    """The audio stream with this number, else the first default one, else the first; streams with an unknown codec
    last."""
    streams = container.streams.audio
    if not streams:
        kinds = ", ".join(stream.type for stream in container.streams) or "no streams"
        raise AudioError(f"{name}: no audio stream ({container.format.name}: {kinds})")
    if track is not None and track > len(streams):
        raise UsageError(f"{name}: no audio track {track}, only {len(streams)} ({numbered(tracks_of(container))})")
    readable = [stream for stream in streams if stream.codec_context is not None]
    default = [stream for stream in readable if stream.disposition & type(stream.disposition).default]
    stream = streams[track - 1] if track is not None else next(iter([*default, *readable, *streams]))
    if stream.codec_context is None:
        raise AudioError(f"{name}: unknown audio codec ({container.format.name})")
    return stream


def tracks_of(container) -> list[str]:
    """Descriptions of the audio tracks, such as "aac 2 ch eng"."""
    return [_described(stream) for stream in container.streams.audio]


def number_of(container, stream) -> int:
    """Number of the track among the audio tracks, from 1."""
    return 1 + [one.index for one in container.streams.audio].index(stream.index)


def numbered(tracks: list[str]) -> str:
    shown = [f"{number} {track}" for number, track in enumerate(tracks[:8], 1)]
    return ", ".join([*shown, "..."] if len(tracks) > 8 else shown)


def _described(stream) -> str:
    codec, language = stream.codec_context, stream.language or ""
    name = f"{codec.name} {codec.channels} ch" if codec is not None else "unknown codec"
    return f"{name} {language}" if language.isalpha() and language != "und" else name


def check_plausible(name: str, rate: int, channels: int = 1) -> None:
    """Raise AudioError for an implausible format, before allocating for it."""
    low, high = RATES
    if not low <= rate <= high:
        raise AudioError(f"{name}: sample rate {rate} Hz, expected {low:,} to {high:,}")
    if not 1 <= channels <= MOST_CHANNELS:
        raise AudioError(f"{name}: {channels} channels, expected 1 to {MOST_CHANNELS}")


def check_rate(argument: str, rate: int) -> None:
    """Raise UsageError for an implausible `rate` argument."""
    low, high = RATES
    if not isinstance(rate, Integral) or not low <= rate <= high:
        raise UsageError(f"{argument}: must be a whole number from {low:,} to {high:,} Hz (got {rate})")


def _cause(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0]
