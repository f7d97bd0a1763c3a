"""Makers of video files."""

import io
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction

import av
import numpy as np

TICK = Fraction(1, 1000)  # seconds, of the times below


def video(
    images: Sequence[np.ndarray], times: Sequence[float] | float = 10.0, form: str = "mp4", codec: str = "libx264",
    sound: float = 0.0, cover: bool = False, shape: Fraction = Fraction(1), **options: str,
) -> bytes:  # fmt: skip
    """A file's bytes. `times`: seconds of each image, or their rate; `sound`: seconds of a 440 Hz tone beside them;
    `cover`: the images are an attached cover; `shape`: width / height of a pixel."""
    file = io.BytesIO()
    if isinstance(times, float):
        times = [index / times for index in range(len(images))]
    with av.open(file, "w", format=form) as container:
        height, width = images[0].shape[:2]
        stream = container.add_stream(codec, rate=25, width=width, height=height, options=options)
        stream.pix_fmt = {"png": "rgb24", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        stream.time_base = stream.codec_context.time_base = TICK
        if shape != 1:
            stream.codec_context.sample_aspect_ratio = shape
        if cover:
            stream.disposition = av.stream.Disposition.attached_pic
        audio = container.add_stream("aac", rate=16000, layout="mono") if sound else None
        for image, time in zip(images, times, strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = round(time / TICK), TICK
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if audio is not None:
            tone = (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(16000 * sound)) / 16000)).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return file.getvalue()


def grey(level: int, size: tuple[int, int] = (64, 64)) -> np.ndarray:
    """One grey [H, W, 3]."""
    return np.full((*size, 3), level, np.uint8)


def ramp(count: int) -> list[np.ndarray]:
    """Images of 64x64 whose grey levels are 10 apart, from 10 on, so that the level of a frame names it."""
    return [grey(10 + 10 * index) for index in range(count)]


def numbered(count: int) -> Iterator[np.ndarray]:
    """Images of 48x64 that show their number in twelve black or white blocks; `number_in` reads it."""
    for number in range(count):
        bits = np.array([number >> bit & 1 for bit in range(12)], np.uint8).reshape(3, 4)
        yield np.repeat(bits.repeat(16, 0).repeat(16, 1)[..., None] * 255, 3, 2)


def number_in(image: object) -> int:
    blocks = np.asarray(image)[8::16, 8::16, 1].ravel() > 128
    return int(blocks @ (1 << np.arange(12)))


def noise(count: int) -> list[np.ndarray]:
    """Images that need many bytes, for damage that hits one."""
    return [np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8) for seed in range(count)]


def turned(data: bytes, *matrix: int) -> bytes:
    """An MP4 with the display matrix (a, b, c, d)."""
    a, b, c, d = (value * 65536 for value in matrix)
    place = data.index(b"tkhd") + 44
    return data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]
