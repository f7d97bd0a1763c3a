"""Open audio tracks: choice of the track, plausibility of its format."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.demux import demuxed

# Telephones use 8,000 Hz, early sound cards 4,000; DSD512 decodes to 3,072,000.
RATES = (1000, 3072000)
MOST_CHANNELS = 512  # FFmpeg's own limit for WAV


@contextmanager
def opened(source: str | Path | bytes, name: str, track: int | None = None) -> Iterator[tuple]:
    """Yield the container, its audio stream (`track` counts from 1; None: see `_chosen`) and the file."""
    with demuxed(source, name, AudioError, "recording") as (container, file):
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


def check_rate(argument: str, rate: Any) -> None:
    """Raise UsageError for an implausible `rate` argument."""
    low, high = RATES
    if not isinstance(rate, Integral) or not low <= rate <= high:
        got = repr(rate) if isinstance(rate, str) else rate
        raise UsageError(f"{argument}: must be a whole number from {low:,} to {high:,} Hz (got {got})")
