"""Resizing, cropping and normalization in one compiled pass, to the bit as Pillow and NumPy do them.

Pillow resizes with weights of 22 bits in integers, along one axis after the other. It takes columns first, but from
release 13 on rows where the height shrinks by more than twice the pixels that the width does (pull request 9549)."""

import ctypes
import math
import platform
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from multimodal.system.compiled import FLAGS, load_compiled
from multimodal.system.memory import keep_freed_memory

BITS = 22
REACH = {"bilinear": 1.0, "bicubic": 2.0}  # of a filter, in pixels
PATIENCE = 200  # images that Pillow resizes before the pass is compiled, which takes as long
SOURCE = Path(__file__).with_name("resize.cpp")
TRIED = ((31, 17, 24, 13), (17, 31, 15, 12), (9, 8, 21, 30))  # widths and heights before and after


class Cut(NamedTuple):
    """`size` (width, height) to which an image, or the box `source` of it, is resized, and the `box` (left, top, right,
    bottom) of the result that is taken."""

    size: tuple[int, int]
    box: tuple[int, int, int, int]
    source: tuple[float, float, float, float] | None = None


class _AxisRecord(ctypes.Structure):
    """See `resize.cpp`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("firsts", "counts", "weights")),
        *((name, ctypes.c_int64) for name in ("taps", "begin", "end")),
    )  # fmt: skip


Resize = Callable[[np.ndarray, Cut, str, np.ndarray | None, np.ndarray], None]  # see `_loaded`


class _Compiled:
    """The pass, or None for as long as Pillow is as good: without a compiler, and for the first images on a machine."""

    def __init__(self) -> None:
        self.calls, self.done, self.resize, self.lock = 0, False, None, threading.Lock()

    def get(self) -> Resize | None:
        if not self.done and self.lock.acquire(blocking=False):  # other threads go on with Pillow, as does a fork
            try:
                self._look()
            finally:
                self.lock.release()
        return self.resize

    def _look(self) -> None:
        if not self.calls:
            keep_freed_memory()
            self.resize = _loaded(build=False)
        elif self.calls >= PATIENCE and self.resize is None:
            self.resize = _loaded(build=True)
        self.done = self.resize is not None or self.calls >= PATIENCE
        self.calls += 1


compiled = _Compiled()


def can_do(cut: Cut, size: tuple[int, int], interpolation: str) -> bool:
    """Return True for what the pass can do to an image of `size` (width, height): resize it by a known filter, and cut
    only along axes that change."""
    left, top, right, bottom = cut.box
    axes = zip(size, cut.size, ((left, right), (top, bottom)), strict=True)
    return interpolation in REACH and cut.size != size and all(
        0 <= first < last <= new and (new != old or (first, last) == (0, new)) for old, new, (first, last) in axes
    )  # fmt: skip


def level_table(mean: Sequence[float], std: Sequence[float]) -> Float32[np.ndarray, "3 256"]:
    """(level / 255 - mean) / std of each band."""
    return np.stack([_levels(*both) for both in zip(mean, std, strict=True)])


@lru_cache(maxsize=64)
def _levels(mean: float, std: float) -> Float32[np.ndarray, "256"]:
    return (np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(mean)) / np.float32(std)


def _loaded(build: bool) -> Resize | None:
    """The function that writes an image's normalized pixels, checked against this Pillow."""
    if platform.machine() not in ("x86_64", "AMD64"):  # elsewhere Pillow's compiler may fuse sums of weights
        return None
    library = load_compiled([SOURCE], "the resizing of images", "images are resized by Pillow alone", FLAGS, build)
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.resize.argtypes, library.resize.restype = (*(pointer, number, number), *(pointer, pointer, number),
                                                       *(pointer, pointer)), None  # fmt: skip

    def resize(
        image: UInt8[np.ndarray, "H W 3"], cut: Cut, interpolation: str, table: Float32[np.ndarray, "3 256"] | None,
        planes: Float32[np.ndarray, "3 h w"] | UInt8[np.ndarray, "3 h w"],
    ) -> None:  # fmt: skip
        """Write numbers of the `table`, without one levels. Raises ValueError for arrays that it would overrun."""
        height, width = image.shape[:2]
        (new_width, new_height), (left, top, right, bottom), source = cut
        _check(image, np.uint8, (height, width, 3))
        _check(planes, np.uint8 if table is None else np.float32, (3, bottom - top, right - left))
        if table is not None:
            _check(table, np.float32, (3, 256))
        first, upper, last, lower = source or (0, 0, width, height)
        down = _axis(height, new_height, top, bottom, interpolation, float(upper), float(lower))
        across = _axis(width, new_width, left, right, interpolation, float(first), float(last))
        rows_first = new_height < height and height - new_height > 2 * (width - new_width)
        places = (None if one is None else ctypes.addressof(one.record) for one in (down, across))
        tables = None if table is None else table.ctypes.data
        library.resize(image.ctypes.data, height, width, *places, not rows_first, tables, planes.ctypes.data)

    return resize if all(_is_exact(resize, *sizes) for sizes in TRIED) else None


def _check(array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(f"expected contiguous {dtype.__name__} of shape {shape} (got {array.dtype} of {array.shape})")


def _is_exact(resize: Resize, width: int, height: int, new_width: int, new_height: int) -> bool:
    """Compare with this release of Pillow."""
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    right = Image.fromarray(levels).resize((new_width, new_height), Image.Resampling.BICUBIC)
    made, same = np.empty((3, new_height, new_width), np.float32), np.tile(np.arange(256, dtype=np.float32), (3, 1))
    resize(levels, Cut((new_width, new_height), (0, 0, new_width, new_height)), "bicubic", same, made)
    return bool((made == np.asarray(right).transpose(2, 0, 1)).all())


class _Axis(NamedTuple):
    record: _AxisRecord
    tensors: tuple[np.ndarray, ...]  # that the record points into


@lru_cache(maxsize=256)
def _axis(old: int, new: int, begin: int, end: int, interpolation: str, first: float, last: float) -> _Axis | None:
    """None where nothing changes."""
    if old == new and (first, last) == (0, old):
        return None
    tensors = _weights(old, new, interpolation, first, last)
    places = (one.ctypes.data for one in tensors)
    return _Axis(_AxisRecord(*places, tensors[2].shape[1], begin, end), tensors)


@lru_cache(maxsize=64)
def _weights(
    old: int, new: int, interpolation: str, first: float, last: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """First input and number of inputs of each output, and their weights in 22 bits: Pillow's, in its order of
    operations. It holds the ends of a box in float32."""
    scale = float(np.float32(last) - np.float32(first)) / new
    wide = max(scale, 1.0)
    reach = REACH[interpolation] * wide
    centres = float(np.float32(first)) + (np.arange(new) + 0.5) * scale
    firsts = np.maximum((centres - reach + 0.5).astype(np.int64), 0)  # towards zero
    counts = np.minimum((centres + reach + 0.5).astype(np.int64), old) - firsts
    taps = np.arange(2 * math.ceil(reach) + 1)
    shares = _filter(interpolation, ((taps + firsts[:, None]) - centres[:, None] + 0.5) * (1.0 / wide))
    shares = np.where(taps < counts[:, None], shares, 0.0)
    total = np.zeros(new)
    for column in shares.T:  # one after the other, as rounding depends on the order
        total += column
    shares = np.where(total[:, None] != 0, shares / np.where(total == 0, 1, total)[:, None], shares)
    whole = np.where(shares < 0, -0.5 + shares * (1 << BITS), 0.5 + shares * (1 << BITS))
    return tuple(np.ascontiguousarray(one, dtype=np.int32) for one in (firsts, counts, np.trunc(whole)))


def _filter(interpolation: str, x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    if interpolation == "bilinear":
        return np.where(x < 1, 1 - x, 0.0)
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
