"""Validate a FAISS file before FAISS maps it: the library trusts counts, and crashes on wrong ones.

Only the format of `build_search` is accepted (faiss/impl/index_write.cpp)."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from multimodal.errors import CheckpointError

_DUMMY = 1 << 20  # written twice for obsolete fields
_EIGHT_BITS = 0  # ScalarQuantizer::QT_8bit


def check_faiss(path: Path, count: int, width: int) -> None:
    """Raises CheckpointError unless the file is an index of `count` vectors of `width` numbers."""
    try:
        file = _File(path)
        _check_ivf(file, count, width)
        file.same("end of the file", file.at, len(file.data))
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None


class _File:
    """Reads fields one by one. Raises ValueError for an unexpected value."""

    def __init__(self, path: Path):
        self.data, self.at = np.memmap(path, np.uint8, "r"), 0

    def fields(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        values = struct.unpack(f"<{layout}", self.data[self.at : self.at + size].tobytes())
        self.at += size
        return values

    def same(self, name: str, actual: Any, expected: Any) -> None:
        if actual != expected:
            raise ValueError(f"{name}: expected {expected}, got {actual}")

    def array(self, name: str, dtype: str, length: int) -> np.ndarray:
        """A vector preceded by its length."""
        self.same(f"length of {name}", self.fields("Q")[0], length)
        return self.raw(name, dtype, length)

    def raw(self, name: str, dtype: str, length: int) -> np.ndarray:
        end = self.at + length * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"{name}: {length} values exceed the file")
        values = np.frombuffer(self.data, dtype, length, self.at)
        self.at = end
        return values

    def header(self, name: bytes, count: int, width: int) -> None:
        found = self.fields("4siqqq?i")  # an inner product has metric 0
        self.same("header", found, (name, width, count, _DUMMY, _DUMMY, True, 0))
        self.same("byte of a flag", int(self.data[self.at - 5]), 1)

    def quantizer(self, width: int) -> None:
        kind, _, _, *sizes = self.fields("iifQQ")
        self.same("scalar quantizer", (kind, *sizes), (_EIGHT_BITS, width, width))
        self.array("ranges", "<f4", 2 * width)


def _check_ivf(file: _File, count: int, width: int) -> None:
    file.header(b"IwSq", count, width)
    lists, _ = file.fields("QQ")
    if not 0 < lists <= max(count, 1):
        raise ValueError(f"{lists} lists of {count} vectors")
    file.header(b"IxFI", lists, width)
    file.array("centroids", "<f4", lists * width)
    file.same("direct map", file.fields("BQ"), (0, 0))
    file.quantizer(width)
    size, residual = file.fields("QB")
    file.same("code size", (size, residual in (0, 1)), (width, True))
    file.same("lists", file.fields("4sQQ"), (b"ilar", lists, width))
    (form,) = file.fields("4s")
    if form == b"full":
        sizes = file.array("list sizes", "<u8", lists)
    else:
        file.same("form of the lists", form, b"sprs")
        pairs = file.raw("list sizes", "<u8", 1)[0]
        if pairs % 2 or pairs > 2 * lists:
            raise ValueError(f"{pairs // 2} of {lists} lists")
        places, sizes = file.raw("list sizes", "<u8", int(pairs)).reshape(-1, 2).T
        if len(places) and (int(places.max()) >= lists or len(np.unique(places)) < len(places)):
            raise ValueError("a list is repeated or out of range")
    if len(sizes) and int(sizes.max()) > count:
        raise ValueError(f"a list of {sizes.max()} vectors")
    file.same("vectors in the lists", int(sizes.sum()), count)
    file.raw("lists", "u1", count * (width + 8))
