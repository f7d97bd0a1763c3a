"""Audio held in memory: bytes, file objects, arrays, and the pairs and dictionaries of other libraries.

An array goes the way of a file that holds it: offset, downmix, resampling. A shape or type that could mean two things
is refused.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32
from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.arrays import content_of, numpy_of
from multimodal.tokens.audio.levels import Levels
from multimodal.tokens.audio.offset import without_offset
from multimodal.tokens.audio.reading import SAMPLE_RATE, as_floats, chunked, converted
from multimodal.tokens.audio.tracks import check_rate

MOST_CHANNELS = 16  # of an array; a longer axis is time
LOUDEST = 16.0  # of full scale; integers converted to floats without scaling are far above
TYPES = ("int16", "int32", "float16", "float32", "float64")
_Samples = np.ndarray | Tensor


@runtime_checkable  # so that whoever checks types at run time can check AudioInput
class AudioDecoder(Protocol):
    """torchcodec's decoder of a recording."""

    def get_all_samples(self) -> Any: ...


_Pair = tuple[int, _Samples] | tuple[_Samples, int]
AudioInput = str | Path | bytes | IO[bytes] | _Samples | Mapping[str, Any] | _Pair | AudioDecoder


class Samples(NamedTuple):
    """Samples [C T] at `rate` Hz, in the type of the array that they come from."""

    channels: np.ndarray
    rate: int

    def stream(
        self, chunk_seconds: float, channel: int | None = None, remarks: list[str] | None = None
    ) -> Iterator[Float[Tensor, "T"]]:
        """Yield mono chunks at 16 kHz, as `stream_audio` does for files."""
        levels = Levels()
        yield from chunked(self._converted(channel, levels), round(chunk_seconds * SAMPLE_RATE))
        if remarks is not None:
            remarks += [f"<samples>: {text}" for text in levels.remarks()]

    def _converted(self, channel: int | None, levels: Levels) -> Iterator[Float32[np.ndarray, "n"]]:
        if channel is not None and channel >= len(self.channels):
            raise UsageError(f"channel {channel}: <samples> has {len(self.channels)} channels")
        chosen = self.channels if channel is None else self.channels[channel : channel + 1]

        def seconds() -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
            for start in range(0, chosen.shape[1], self.rate):
                with np.errstate(over="ignore"):  # infinite, and refused
                    sound = as_floats(chosen[:, start : start + self.rate])
                yield self.rate, _checked(sound, start / self.rate)

        for piece in converted(without_offset(seconds(), seconds, levels), SAMPLE_RATE):
            yield np.clip(piece, -1, 1)


def _checked(sound: Float32[np.ndarray, "C n"], start: float) -> Float32[np.ndarray, "C n"]:
    if not np.isfinite(sound).all():
        raise AudioError(f"<samples>: not a finite sample near {start:g} s ({sound[~np.isfinite(sound)][0]})")
    if (peak := float(np.abs(sound).max())) > LOUDEST:
        raise AudioError(f"<samples>: floats must be in [-1, 1] (got {peak:g} near {start:g} s)")
    return sound


def as_audio(source: Any, sampling_rate: int | None = None) -> str | Path | bytes | Samples:
    """Return a path, the bytes of a file, or samples.

    `source`: a path, bytes or a binary file object; an array or tensor [T], [C T] or [T C] of int16, int32 or floats in
    [-1, 1], at `sampling_rate` Hz (default: 16,000); (rate, array), as SciPy and Gradio give, or (array, rate), as
    soundfile and librosa do; or, as Hugging Face's datasets give, {"array", "sampling_rate"}, {"bytes", "path"} or
    torchcodec's AudioDecoder.

    Raises AudioError, and UsageError for a rate where there can be none."""
    if isinstance(source, Samples):
        return source
    if isinstance(source, Mapping):
        source, sampling_rate = _of_mapping(source, sampling_rate)
    elif isinstance(source, tuple):
        source, sampling_rate = _of_tuple(source, sampling_rate)
    elif callable(decode := getattr(source, "get_all_samples", None)):
        decoded = decode()
        source, sampling_rate = decoded.data, _same_rate(decoded.sample_rate, sampling_rate)
    if isinstance(source, bytearray | memoryview):
        source = bytes(source)
    if isinstance(source, np.ndarray | Tensor):
        rate: Any = SAMPLE_RATE if sampling_rate is None else sampling_rate
        rate = int(rate) if isinstance(rate, float | np.floating) and rate.is_integer() else rate
        check_rate("sampling_rate", rate)
        return Samples(_channels(source), int(rate))
    readable = callable(getattr(source, "read", None))
    if not readable and not isinstance(source, str | os.PathLike | bytes):
        expected = "a path, bytes, a file object, an array, (rate, array) or {'array', 'sampling_rate'}"
        several = "; many() takes a list of recordings" if isinstance(source, list) else ""
        raise AudioError(f"<{type(source).__name__}>: expected {expected}{several}")
    if sampling_rate is not None:
        raise UsageError(f"{sampling_rate}: only for arrays, a file has its own", argument="sampling_rate")
    if readable:
        source = content_of(source, AudioError)
    return source if isinstance(source, str | bytes) else Path(source)


def _of_tuple(source: tuple[Any, ...], sampling_rate: int | None) -> tuple[Any, Any]:
    arrays = [isinstance(one, np.ndarray | Tensor) for one in source]
    if sorted(arrays) != [False, True]:
        kinds = ", ".join(type(one).__name__ for one in source)
        raise AudioError(f"<tuple>: expected (sampling rate, array) or (array, sampling rate) (got ({kinds}))")
    array = arrays.index(True)
    return source[array], _same_rate(source[1 - array], sampling_rate)


def _of_mapping(source: Mapping[str, Any], sampling_rate: int | None) -> tuple[Any, int | None]:
    if source.get("array") is not None:
        if source.get("sampling_rate") is None:
            raise AudioError("<dict>: expected 'sampling_rate' beside 'array'")
        if not isinstance(source["array"], np.ndarray | Tensor):
            raise AudioError(f"<dict>: 'array' must be an array or tensor (got {type(source['array']).__name__})")
        return source["array"], _same_rate(source["sampling_rate"], sampling_rate)
    found = next((source[name] for name in ("bytes", "path") if source.get(name) is not None), None)
    if found is None:
        raise AudioError(f"<dict>: expected 'array', 'bytes' or 'path' (got {', '.join(map(str, source)) or 'none'})")
    return found, sampling_rate


def _same_rate(own: Any, sampling_rate: int | None) -> Any:
    if sampling_rate not in (None, own):
        raise UsageError(f"{sampling_rate}: the audio has its own rate, {own}", argument="sampling_rate")
    return own


def _channels(source: np.ndarray | Tensor) -> np.ndarray:
    """Samples [C T] of an array [T], [C T] or [T C]: the longer axis is time."""
    array = numpy_of(source, "samples", AudioError)
    if array.dtype.name not in TYPES:
        raise AudioError(f"samples: expected {', '.join(TYPES)} (got {array.dtype})")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2:
        raise AudioError(f"samples: expected shape [T], [C T] or [T C] (got {list(array.shape)})")
    if not array.size:
        raise AudioError(f"samples: expected at least one (got shape {list(source.shape)})")
    channels, length = sorted(array.shape)
    if channels > MOST_CHANNELS or (1 < length <= MOST_CHANNELS and channels > 1):
        limits = f"one axis of at most {MOST_CHANNELS} channels and a longer one of time"
        raise AudioError(f"samples: expected {limits} (got shape {list(array.shape)})")
    return array if array.shape[0] == channels else array.T
