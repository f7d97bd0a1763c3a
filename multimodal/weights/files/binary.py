"""Weights files of other programs that are plain binary data, read value by value."""

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from multimodal.errors import CheckpointError, one_line
from multimodal.system import memory

MOST_AXES = 8
MOST_NAME = 1 << 12  # bytes


class BinaryReader:
    """Little-endian values in order. Raises ValueError at the end of the file, before memory is allocated."""

    def __init__(self, path: Path):
        self.file, self.left = path.open("rb"), path.stat().st_size

    def bytes(self, count: int, what: str) -> bytearray:
        if count > self.left:
            raise ValueError(f"cut off: {what} needs {count} bytes, {self.left} are left")
        self.left -= count
        data = bytearray(count)
        self.file.readinto(data)
        return data

    def numbers(self, layout: str, what: str) -> tuple:
        """Values of a `struct` layout without its byte order."""
        return struct.unpack(f"<{layout}", self.bytes(struct.calcsize(f"<{layout}"), what))

    def text(self, count: int, what: str) -> str:
        if count > MOST_NAME:
            raise ValueError(f"{what} of {count} bytes, more than {MOST_NAME}")
        return self.bytes(count, what).decode()

    def shape(self, axes: int, what: str) -> tuple[int, ...]:
        if not 0 <= axes <= MOST_AXES:
            raise ValueError(f"{what} has {axes} axes, more than {MOST_AXES}")
        sizes = self.numbers(f"{axes}I", what)
        if (needed := 4 * math.prod(sizes)) > 32 * self.left:  # 4-bit weights grow by 7 as float32
            raise ValueError(f"{what} of shape {list(sizes)} needs {needed} bytes, more than the file can fill")
        return sizes

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
        data = self.bytes(math.prod(shape) * dtype.itemsize, what)
        return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


@contextmanager
def binary_reader(path: Path, kind: str) -> Iterator[BinaryReader]:
    """Open a file of this `kind`. Raises CheckpointError that names both for what is damaged or refused."""
    memory.require(path.stat().st_size, path)
    try:
        reader = BinaryReader(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
    with reader.file:
        try:
            yield reader
        except (ValueError, RuntimeError, OSError) as error:
            if cause := memory.out_of_memory(error):
                raise CheckpointError(f"{path}: {cause}") from None
            raise CheckpointError(f"{path}: {kind}, {one_line(error, 200)}") from None
