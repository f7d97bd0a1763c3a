"""Live 16-bit PCM, read in a thread that records when samples arrive."""

import queue
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from time import monotonic
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import AudioError
from multimodal.tokens.audio.downmix import Resampler
from multimodal.tokens.audio.log_mel import RATE
from multimodal.tokens.audio.offset import LiveOffset
from multimodal.tokens.audio.packets import frame_size
from multimodal.tokens.audio.reading import TruncatedAudio
from multimodal.tokens.audio.tracks import check_rate

BLOCK_SECONDS = 0.1  # longest read
AHEAD = 600  # queued reads, up to a minute; then the writer blocks

WAV_HEADER = 1 << 16  # bytes at most
RECORDINGS = {
    b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\x1aE\xdf\xa3": "WebM", b"FORM": "AIFF", b".snd": "AU",
    b"caff": "CAF", b"0&\xb2u": "WMA", b"wvpk": "WavPack", b"riff\x2e\x91\xcf\x11": "W64", b"RF64": "RF64",
}  # fmt: skip
TS_PACKET = 188  # bytes


class PcmChunk(NamedTuple):
    """Samples [T] at 16 kHz and their arrival (seconds of `time.monotonic`)."""

    samples: Tensor
    arrived: float


class PcmReader:
    """Mono 16-bit little-endian samples at `rate` Hz from `read(n)`, which returns 1 to n bytes as soon as available
    and b"" at the end, like `os.read`. (Python aborts if `sys.stdin.buffer.read1` still waits at exit.)

    A matching WAV header is skipped. Raises UsageError for an implausible rate; AudioError for an empty or unreadable
    stream and other formats. Half a sample at the end gives a TruncatedAudio warning."""

    def __init__(self, read: Callable[[int], bytes], rate: int = RATE, name: str = "stdin"):
        check_rate("rate", rate)
        self.rate, self.name, self._read = rate, name, read
        self._queue: queue.Queue[tuple[float, bytes | Exception]] = queue.Queue(AHEAD)
        self._come = self._taken = 0  # bytes; each written by one thread
        self._stopped = False

    def waiting(self) -> float:
        """Seconds of audio in the queue."""
        return (self._come - self._taken) / (2 * self.rate)

    def __iter__(self) -> Iterator[PcmChunk]:
        # daemon: a read that waits for a silent writer must not keep the process alive
        threading.Thread(target=self._follow, daemon=True).start()
        resampler, half, arrived, begun = Resampler(self.rate, RATE), b"", monotonic(), False
        offset = LiveOffset(self.rate)
        try:
            while (entry := self._queue.get())[1]:
                arrived, data = entry
                if isinstance(data, Exception):
                    raise AudioError(f"{self.name}: cannot be read ({data})") from None
                self._taken += len(data)
                data = half + data
                if not begun:
                    if (samples := self._begin(data)) is None:
                        half = data
                        continue
                    begun, data = True, samples
                whole = len(data) // 2 * 2
                half = data[whole:]
                yield PcmChunk(_tensor(resampler.push(offset.push(_floats(data[:whole])))), arrived)
            if self._taken < 2:
                raise AudioError(f"{self.name}: no samples ({self._taken} bytes)")
            yield PcmChunk(_tensor(resampler.flush()), arrived)
            if half:
                message = f"{self.name}: ends within a 16-bit sample ({self._taken} bytes, an odd number)"
                warnings.warn(TruncatedAudio(message), stacklevel=2)
        finally:
            self._stopped = True

    def _begin(self, data: bytes) -> bytes | None:
        """Samples after a WAV header, if any; None if it is incomplete. Raises AudioError."""
        if kind := _recording(data):
            raise AudioError(f"{self.name}: expected raw 16-bit samples, got {kind}")
        if not data.startswith(b"RIFF"):
            return None if len(data) < 4 and b"RIFF".startswith(data) else data
        fmt, place = data.find(b"fmt "), data.find(b"data")
        if not 0 <= fmt <= place - 24 or len(data) < place + 8:
            return None if len(data) < WAV_HEADER else data
        _, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, fmt + 8)
        if (channels, rate, bits) != (1, self.rate, 16):
            raise AudioError(f"{self.name}: expected a WAV of 1 channel, {self.rate} Hz, 16 bits, "
                             f"got {channels}, {rate} Hz, {bits}")  # fmt: skip
        return data[place + 8 :]

    def _follow(self) -> None:
        size = max(2, 2 * round(BLOCK_SECONDS * self.rate))
        try:
            while data := self._read(size):
                self._come += len(data)
                if not self._put(data):
                    return
            self._put(b"")
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._put(error)

    def _put(self, data: bytes | Exception) -> bool:
        """Queue data; False when the consumer has stopped."""
        entry = monotonic(), data
        while not self._stopped:
            try:
                self._queue.put(entry, timeout=0.5)
            except queue.Full:
                continue
            return True
        return False


def _recording(data: bytes) -> str | None:
    """Format of a recording by its first bytes. Marks of one or two bytes must repeat at the next packet."""
    if data[4:8] == b"ftyp":
        return "MP4"
    if data[: 2 * TS_PACKET + 1 : TS_PACKET] == b"GGG":
        return "MPEG-TS"
    size = frame_size(data[:6]) or 0
    if size > 6 and data[size : size + 2] == data[:2]:
        return "MP3" if data[1] & 6 else "AAC"
    return next((name for mark, name in RECORDINGS.items() if data.startswith(mark)), None)


def _floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def _tensor(samples: np.ndarray) -> Float[Tensor, "T"]:
    return torch.from_numpy(samples)
