"""Images held in memory: bytes, file objects, PIL images, NumPy arrays and tensors.

A uint8 array gives the same image as a PNG file that holds it. A shape or type that could mean two things is refused.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image
from torch import Tensor

from multimodal.errors import ImageError
from multimodal.tokens.arrays import content_of, numpy_of
from multimodal.tokens.image.reading import ImageLimits, check_size, read_image
from multimodal.tokens.image.samples import EIGHT_BITS

SEVERAL = "; pass several images as a list"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by number of channels
ImageInput = str | Path | bytes | IO[bytes] | Image.Image | np.ndarray | Tensor


def as_image(source: Any) -> Image.Image:
    """Read a path, bytes or a binary file object, or those of {"bytes", "path"}, as Hugging Face's datasets give;
    convert an array; return a PIL image as it is. All have the limits of `ImageLimits`.

    Arrays are [H W], [H W 3] or [H W 4], tensors [3 H W], [1 H W], [4 H W] or [H W]; channels are RGB or RGBA. Values:
    uint8, uint16 (65535 is white), or floats in [0, 1]. Raises ImageError."""
    if isinstance(source, Mapping):
        source = next((source[name] for name in ("bytes", "path") if source.get(name) is not None), source)
    if isinstance(source, Image.Image):
        check_size(source.size, ImageLimits(), f"<{type(source).__name__}>")
        return source
    if isinstance(source, np.ndarray | Tensor):
        return _of_array(source)
    if callable(getattr(source, "read", None)):
        return read_image(content_of(source, ImageError))
    if not isinstance(source, str | os.PathLike | bytes):
        expected = "a path, bytes, a file object, a PIL image, an array or a tensor"
        several = isinstance(source, Iterable) and not isinstance(source, list | Mapping)
        raise ImageError(f"<{type(source).__name__}>: expected {expected}{SEVERAL if several else ''}")
    if source == "":
        raise ImageError("'': expected a path")
    return read_image(source if isinstance(source, bytes) else Path(source))


def images_of(images: Any) -> list[Any]:
    """One image, or several, as a list."""
    return list(images) if isinstance(images, list | tuple) else [images]


def _of_array(source: np.ndarray | Tensor) -> Image.Image:
    tensor = isinstance(source, Tensor)
    name = "<Tensor>" if tensor else "<ndarray>"
    array = numpy_of(source, name, ImageError)
    where = 0 if tensor else array.ndim - 1
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[where] not in MODES):
        expected = "[3 H W]" if tensor else "[H W], [H W 3] or [H W 4]"
        raise ImageError(f"{name}: expected {expected} (got shape {list(array.shape)}{_hint(array, tensor)})")
    planes = array[..., None] if array.ndim == 2 else np.moveaxis(array, where, -1)
    check_size((planes.shape[1], planes.shape[0]), ImageLimits(), name)
    pixels = _eight_bits(planes, name)
    return Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))


def _hint(array: np.ndarray, tensor: bool) -> str:
    if array.ndim == 4 or (array.ndim == 1 and array.dtype.kind in "OUS"):
        return SEVERAL
    if array.ndim == 3 and array.shape[-1 if tensor else 0] in MODES:
        return "; channels come first in a tensor" if tensor else "; channels come last in an array"
    return ""


def _eight_bits(planes: np.ndarray, name: str) -> np.ndarray:
    if planes.dtype == np.uint8:
        return planes
    if planes.dtype.kind == "u" and planes.dtype.itemsize == 2:  # of either byte order
        if planes.shape[-1] > 1:
            return (planes >> 8).astype(np.uint8)  # as Pillow reads a file of 16-bit colours; grey is rounded
        scaled: np.ndarray = EIGHT_BITS[planes]
        return scaled
    if planes.dtype.kind != "f":
        raise ImageError(f"{name}: expected uint8, uint16 or floats in [0, 1] (got {planes.dtype})")
    low, high = planes.min(), planes.max()  # NaN if any value is
    if not (low >= 0 and high <= 1):
        raise ImageError(f"{name}: floats must be in [0, 1] (got {low:.9g} to {high:.9g})")
    made: np.ndarray = np.rint(planes * np.float32(255)).astype(np.uint8)
    return made
