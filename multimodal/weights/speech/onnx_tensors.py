"""The weights in an ONNX file, read as data: only the named float tensors of its graph, no operator is run.

ONNX is a protocol buffer; of its messages (onnx/onnx.proto) these fields are read: ModelProto.graph = 7,
GraphProto.initializer = 5, TensorProto.dims = 1, data_type = 2, name = 8, raw_data = 9."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from multimodal.errors import CheckpointError

FLOAT = 1  # TensorProto.DataType


def read_onnx_tensors(path: Path) -> dict[str, Tensor]:
    """The float32 initializers by name. Raises CheckpointError for a file that is missing or damaged."""
    try:
        data = memoryview(path.read_bytes())
        graphs = [value for field, value in _fields(data) if field == 7]
        found = [_tensor(value) for graph in graphs for field, value in _fields(graph) if field == 5]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as ONNX ({error})") from None
    return {name: tensor for name, tensor in found if tensor is not None}


def _tensor(message: memoryview) -> tuple[str, Tensor | None]:
    """Name and values; None for another type, and for values that are not stored as plain bytes."""
    dims, kind, name, raw = [], 0, "", b""
    for field, value in _fields(message):
        if isinstance(value, int) and field in (8, 9):  # bytes(n) would make n of them
            raise ValueError(f"field {field} is a number")
        if field == 1:
            dims += [value] if isinstance(value, int) else _packed(value)
        elif field == 2:
            kind = value
        elif field == 8:
            name = bytes(value).decode()
        elif field == 9:
            raw = bytearray(value)
    if kind != FLOAT or len(raw) != 4 * math.prod(dims) or not raw:
        return name, None
    return name, torch.frombuffer(raw, dtype=torch.float32).reshape(dims)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of each field."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        sizes = {1: 8, 5: 4}
        if key & 7 == 2:
            size, at = _varint(message, at)
        elif key & 7 in sizes:
            size = sizes[key & 7]
        else:
            raise ValueError(f"field of type {key & 7} at byte {at}")
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes is cut off")
        yield key >> 3, message[at : at + size]
        at += size


def _packed(message: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(message):
        value, at = _varint(message, at)
        found.append(value)
    return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number without end at byte {at}")
