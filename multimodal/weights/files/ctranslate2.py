"""CTranslate2's `model.bin`, as faster-whisper has, read as data (ctranslate2/specs/model_spec.py, `_serialize`)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.system.files import optional_json
from multimodal.weights.files.binary import BinaryReader, binary_reader

VERSION = 6  # since CTranslate2 2.16 (2022); Whisper came later
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
MOST = 100_000  # variables


def read_ctranslate2(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights by name, int8 and int16 ones as the numbers that they stand for, and a configuration: `spec`, the scalars
    in the file, and `config.json` beside it. Raises CheckpointError."""
    with binary_reader(path, "a CTranslate2 model") as reader:
        (version,) = reader.numbers("I", "the version")
        if version != VERSION:
            raise ValueError(f"expected version {VERSION} (got {version})")
        config: dict[str, Any] = {"spec": _text(reader, "the specification")}
        reader.numbers("I", "the revision")
        variables = dict(_variable(reader) for _ in range(_count(reader, "variables")))
        aliases = {_text(reader, "an alias"): _text(reader, "an alias") for _ in range(_count(reader, "aliases"))}
        if reader.left:
            raise ValueError(f"{reader.left} bytes follow its end")
        config |= {name: tensor.item() for name, tensor in variables.items() if not tensor.ndim}
        weights = {name: _real(name, variables) for name, tensor in variables.items()
                   if tensor.ndim and not name.endswith("_scale")}  # fmt: skip
        for name, target in aliases.items():
            if name in weights or target not in weights:
                raise ValueError(f"{name!r} repeats {target!r}, which is " + ("absent", "set")[name in weights])
            weights[name] = weights[target]
    return weights, config | optional_json(path.parent / "config.json")


def _count(reader: BinaryReader, what: str) -> int:
    (count,) = reader.numbers("I", f"the number of {what}")
    if count > MOST:
        raise ValueError(f"{count} {what}, more than {MOST}")
    return count


def _text(reader: BinaryReader, what: str) -> str:
    (size,) = reader.numbers("H", what)
    return reader.text(size, what).removesuffix("\0")


def _variable(reader: BinaryReader) -> tuple[str, Tensor]:
    name = _text(reader, "a variable")
    what = f"variable {name!r}"
    (axes,) = reader.numbers("B", what)
    shape = reader.shape(axes, what)
    kind, size = reader.numbers("BI", what)
    if kind >= len(TYPES):
        raise ValueError(f"{what} has the unknown number type {kind}")
    tensor = reader.tensor(TYPES[kind], shape, what)
    if size != tensor.nbytes:
        raise ValueError(f"{what} of shape {list(shape)} states {size} bytes, not {tensor.nbytes}")
    return name, tensor


def _real(name: str, variables: dict[str, Tensor]) -> Tensor:
    """A weight; integers divided by their scale, one a row (int8) or one in all (int16)."""
    tensor, scale = variables[name], variables.get(f"{name}_scale")
    if tensor.is_floating_point() and scale is None:
        return tensor
    if tensor.is_floating_point() or scale is None:
        raise ValueError(f"{name!r} holds {tensor.dtype} with{'out' if scale is None else ''} a scale")
    if scale.shape not in ((), tensor.shape[:1]):
        raise ValueError(f"the scale of {name!r} has shape {list(scale.shape)}")
    return tensor / scale.reshape(-1, *[1] * (tensor.ndim - 1))
