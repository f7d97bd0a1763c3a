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


class Upright:
    """Converts the decoded frames of one video, whose pixels have the width / height `shape`, to RGB images."""

    def __init__(self, shape: Fraction | None, name: str):
        from av.video.reformatter import VideoReformatter

        plausible = shape is not None and 1 / MOST_STRETCH <= shape <= MOST_STRETCH
        self.shape, self.name = shape if plausible else Fraction(1), name
        self._scaler = VideoReformatter()  # one for all frames: its tables cost more than a small frame
        self._turns: dict[int, Image.Transpose | None] = {}

    def __call__(self, frame: Any) -> Image.Image:
        """Raises VideoError for too many pixels."""
        width, height, shape = frame.width, frame.height, self.shape
        check_frame(width, height, self.name)
        if shape != 1:
            width, height = (round(width * shape), height) if shape > 1 else (width, round(height / shape))
            check_frame(width, height, self.name)
        made = self._scaler.reformat(frame, width, height, "rgb24", interpolation="BICUBIC")
        if frame.rotation not in self._turns:  # `side_data` makes a cycle, which keeps the frame until it is collected
            self._turns[frame.rotation] = TURNS.get(_matrix(frame))
        turn, plane = self._turns[frame.rotation], made.planes[0]
        # PyAV's `to_image` copies row by row in Python
        image = Image.frombuffer("RGB", (width, height), plane, "raw", "RGB", plane.line_size, 1)
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
