"""Images in memory: each form gives the pixels of the file that holds it; what could mean two things is refused."""

import io
import struct
import zlib
from collections import deque

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.utils.parallel import Parallel, delayed

from multimodal.errors import ImageError
from multimodal.tokens.image.arrays import as_image
from multimodal.tokens.image.reading import to_rgb

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 9, 4), np.uint8)


def rgb(source: object) -> np.ndarray:
    return np.asarray(to_rgb(as_image(source)))


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


FORMS = {
    "bytes": png,
    "row": lambda array: {"bytes": png(array), "path": None},
    "file": lambda array: io.BytesIO(png(array)),
    "image": Image.fromarray,
    "array": lambda array: array,
    "floats": lambda array: array / 255,
    "half": lambda array: (array / 255).astype(np.float32),
    "uint16": lambda array: array.astype(np.uint16) * 257,
    "big-endian": lambda array: (array.astype(np.uint16) * 257).astype(">u2"),
    "tensor": lambda array: torch.from_numpy(array.copy() if array.ndim == 2 else np.moveaxis(array, 2, 0).copy()),
    "strided": lambda array: np.repeat(array, 2, axis=1)[:, ::2],
}  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3, 4], ids=["grey", "rgb", "rgba"])
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_the_png_file(form, channels, tmp_path):
    array = PIXELS[..., 0] if channels == 1 else np.ascontiguousarray(PIXELS[..., :channels])
    path = tmp_path / "a.png"
    path.write_bytes(png(array))
    assert np.array_equal(rgb(FORMS[form](array)), rgb(path))


def test_16_bit_colours_equal_the_png_file():
    array = np.random.default_rng(1).integers(0, 65536, (7, 9, 3), np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)  # Pillow does not write them
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    head = struct.pack(">IIBBBBB", 9, 7, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert np.array_equal(rgb(array), rgb(b"\x89PNG\r\n\x1a\n" + parts))


def test_a_channel_axis_of_one_is_grey():
    grey = PIXELS[..., 0]
    assert np.array_equal(rgb(grey[..., None]), rgb(grey))
    assert np.array_equal(rgb(torch.from_numpy(grey[None].copy())), rgb(grey))


WRONG = {
    "no pixels": (np.zeros((0, 4, 3), np.uint8), "without pixels (4x0)"),
    "channels first": (np.zeros((3, 8, 8), np.uint8), "[H W 3] or [H W 4] (got shape [3, 8, 8]; channels come last"),
    "channels last": (torch.zeros(8, 8, 3), "[3 H W] (got shape [8, 8, 3]; channels come first"),
    "batch": (np.zeros((2, 8, 8, 3), np.uint8), "(got shape [2, 8, 8, 3]; pass several images as a list)"),
    "line": (np.zeros(9, np.uint8), "(got shape [9])"),
    "two channels": (np.zeros((8, 8, 2), np.uint8), "(got shape [8, 8, 2])"),
    "objects": (np.full((4, 4), "a", object), "uint8, uint16 or floats in [0, 1] (got object)"),
    "array of images": (np.array([PIXELS, None], object), "(got shape [2]; pass several images as a list)"),
    "array of paths": (np.array(["a.png", "b.png"]), "(got shape [2]; pass several images as a list)"),
    "empty path": ("", "'': expected a path"),
    "infinite": (np.full((4, 4, 3), np.inf), "floats must be in [0, 1] (got inf to inf)"),
    "bool": (np.zeros((4, 4), bool), "uint8, uint16 or floats in [0, 1] (got bool)"),
    "int64": (torch.zeros(3, 4, 4, dtype=torch.long), "uint8, uint16 or floats in [0, 1] (got int64)"),
    "0 to 255 as floats": (np.full((4, 4, 3), 128.0), "floats must be in [0, 1] (got 128 to 128)"),
    "normalized": (np.full((4, 4, 3), -1.5), "floats must be in [0, 1] (got -1.5 to -1.5)"),
    "rounding": (np.full((4, 4, 3), 1 + 1e-6, np.float32), "floats must be in [0, 1] (got 1.00000095 to 1.00000095)"),
    "nan": (np.full((4, 4, 3), np.nan), "floats must be in [0, 1] (got nan to nan)"),
    "thin": (np.zeros((1, 1001), np.uint8), "too long and thin (1001x1"),
    "thin image": (Image.new("L", (1, 1001)), "<Image>: too long and thin (1x1001"),
    "text file": (io.StringIO("a"), "opened in binary mode (got str)"),
    "image opened as text": (io.TextIOWrapper(io.BytesIO(b"\xff\xd8"), "utf-8"), "opened in binary mode (got str)"),
    "empty file": (io.BytesIO(), "empty (0 bytes)"),
    "no values": (torch.zeros(3, 4, 4, device="meta"), "a dense tensor of numbers (got torch.float32 on meta)"),
    "masked": (np.ma.masked_equal(np.arange(16, dtype=np.uint8).reshape(4, 4), 3), "without a mask (got 1 masked"),
    "series": (deque(["a.png", "b.png"]), "<deque>: expected a path, bytes, a file object, a PIL image, an array or a "
               "tensor; pass several images as a list"),
    "number": (3, "<int>: expected a path, bytes, a file object"),
    "none": (None, "<NoneType>: expected a path"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused_in_one_line(name):
    source, message = WRONG[name]
    with pytest.raises(ImageError) as error:
        as_image(source)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_closed_file_is_refused():
    file = io.BytesIO(b"x")
    file.close()
    with pytest.raises(ImageError, match="cannot be read"):
        as_image(file)


def test_scikit_learn_builds_the_filters_of_warnings_again_after_a_read():
    rgb(png(PIXELS))
    assert Parallel()(delayed(abs)(number) for number in (-1, 2)) == [1, 2]
