"""The usual WAV file of a recognizer, one channel of 16 bits, read without FFmpeg, which takes 40 times as long."""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import Int16

from multimodal.errors import AudioError
from multimodal.system.files import open_media
from multimodal.tokens.audio.tracks import RATES

HEADER = struct.Struct("<4sI8sIHHIIHH4sI")
MOST = 4 << 20  # bytes; longer files are read in parts, by FFmpeg


def plain_wav(source: str | Path | bytes) -> tuple[int, Int16[np.ndarray, "1 n"]] | None:
    """Rate and samples of a WAV file that holds a header and one channel of 16 bits, no more and no less; None for any
    other, and for one that cannot be read."""
    head, body = b"", b""
    with suppress(AudioError, OSError), open_media(source, "", AudioError) as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or head[:4] != b"RIFF":
            return None
        body = file.read(MOST + 1)
    if not 0 < len(body) <= MOST:
        return None
    _, _, wave, size, kind, channels, rate, bytes_rate, block, bits, data, length = HEADER.unpack(head)
    own, expected = (wave, size, kind, channels, bytes_rate, block, bits, data), (1, 1, 2 * rate, 2, 16, b"data")
    if own != (b"WAVEfmt ", 16, *expected) or not RATES[0] <= rate <= RATES[1] or len(body) != length or length % 2:
        return None
    return rate, np.frombuffer(body, "<i2")[None]
