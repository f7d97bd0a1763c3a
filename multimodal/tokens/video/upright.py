"""Decoded frames as players show them: turned as their display matrix says, with square pixels."""

import struct
from fractions import Fraction
from typing import Any

from PIL import Image

from multimodal.errors import VideoError
from multimodal.tokens.image.reading import ImageLimits, check_size

# FFmpeg's single allocations are limited to 128 MB, one plane of 8192x8192 in 16 bits.
LIMITS = ImageLimits(max_pixels=1 << 26)
# (a, b, c, d) of a display matrix by sign (ISO/IEC 14496-12, 6.2.2: x' = ax + cy, y' = bx + dy): what shows it upright.
TURNS = {
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
MOST_STRETCH = 16  # of a pixel; beyond it the ratio is damage


def upright(frame: Any, shape: Fraction | None, name: str) -> Image.Image:
    """An RGB image of a decoded frame whose pixels have the width / height `shape`. Raises VideoError."""
    width, height = frame.width, frame.height
    check_frame(width, height, name)
    if shape and shape != 1 and 1 / MOST_STRETCH <= shape <= MOST_STRETCH:
        width, height = (round(width * shape), height) if shape > 1 else (width, round(height / shape))
        check_frame(width, height, name)
    image = frame.reformat(width=width, height=height, format="rgb24", interpolation="BICUBIC").to_image()
    turn = TURNS.get(_matrix(frame))
    return image if turn is None else image.transpose(turn)


def check_frame(width: int, height: int, name: str) -> None:
    """Raises VideoError for too many pixels, or none."""
    check_size((width, height), LIMITS, name, VideoError)


def _matrix(frame: Any) -> tuple[int, int, int, int]:
    """Signs of the frame's display matrix, rounded to quarter turns."""
    data = next((one for one in frame.side_data if one.type.name == "DISPLAYMATRIX"), None)
    if data is None or data.buffer_size < 36:
        return (1, 0, 0, 1)
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(data)[:36])
    straight = abs(a) + abs(d) >= abs(b) + abs(c)
    parts = (a, 0, 0, d) if straight else (0, b, c, 0)
    return tuple((part > 0) - (part < 0) for part in parts)  # type: ignore[return-value]
