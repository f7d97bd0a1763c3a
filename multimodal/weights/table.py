"""Foreign weights as a table: a total, strict, invertible map between a family's tensor names and ours."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.errors import CheckpointError

Tensors = dict[str, Tensor]


class Op(NamedTuple):
    """`load` turns the foreign tensor into ours; `export` is its exact inverse."""

    load: Callable[[Tensor], list[Tensor]]
    export: Callable[[list[Tensor]], Tensor]


def joined(parts: list[Tensor], axis: int = 0) -> Tensor:
    """`torch.cat`, which imports torch's compiler to find the shape of meta tensors: 0.9 s."""
    if not parts[0].is_meta:
        return torch.cat(parts, axis)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return parts[0].new_empty(shape)


COPY = Op(lambda t: [t], lambda ours: ours[0])
TRANSPOSE = Op(lambda t: [t.T], lambda ours: ours[0].T)  # x @ W, as GPT-2's Conv1D and CLIP's projections
HALVES = Op(lambda t: list(t.chunk(2)), joined)  # fused key, value
THIRDS = Op(lambda t: list(t.chunk(3)), joined)  # fused query, key, value
FIRST = Op(lambda t: [t[None]], lambda ours: ours[0][0])  # ours has a leading axis of 1
NO_FIRST = Op(lambda t: [t[0]], lambda ours: ours[0][None])  # theirs has a leading axis of 1
NO_LAST = Op(lambda t: [t[..., 0]], lambda ours: ours[0][..., None])  # a pointwise convolution is a linear map
SCALAR = Op(lambda t: [t.reshape(())], lambda ours: ours[0].reshape(1))
ANY_SCALAR = Op(SCALAR.load, COPY.export)  # of shape [1] in some files


@dataclass(frozen=True)
class NameRow:
    """One foreign name and ours; `{}` stands for the layer number.

    A row with `reason` drops the foreign tensor; `rebuild` makes it from those exported so far. `optional`: some files
    lack it."""

    foreign: str
    ours: tuple[str, ...] | str = ()
    op: Op = COPY
    reason: str = ""
    rebuild: Callable[[Tensors], Tensor] | None = None
    optional: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def __post_init__(self) -> None:
        if bool(self.targets) == bool(self.reason):
            raise ValueError(f"row {self.foreign!r}: expected our names or a reason to drop it")


def under(prefix: str, ours: str, rows: list[NameRow]) -> list[NameRow]:
    """Prefix each foreign name with `prefix` and each of our names with `ours`."""
    return [replace(row, foreign=prefix + row.foreign, ours=tuple(ours + t for t in row.targets)) for row in rows]


def weight_and_bias(
    foreign: str, ours: tuple[str, ...] | str, op: Op = COPY, weight: Op | None = None
) -> list[NameRow]:
    """The two rows of a linear map or a norm. `weight`: the weight's `op`, if it is another."""
    names, ops = (ours,) if isinstance(ours, str) else ours, {"weight": weight or op, "bias": op}
    return [NameRow(f"{foreign}.{part}", tuple(f"{n}.{part}" for n in names), own) for part, own in ops.items()]


def linears(names: dict[str, str]) -> list[NameRow]:
    """Weight and bias rows of several linear maps or norms, foreign name to ours."""
    return [row for foreign, ours in names.items() for row in weight_and_bias(foreign, ours)]


def qkv(ours: str) -> tuple[str, ...]:
    """Our names of the three maps that fused weights hold."""
    return tuple(f"{ours}.{part}" for part in ("query", "key", "value"))


def in_proj(foreign: str, ours: str) -> list[NameRow]:
    """Rows of nn.MultiheadAttention's fused `in_proj_weight` and `in_proj_bias`."""
    return [replace(row, foreign=f"{foreign}.in_proj_{kind}")
            for row, kind in zip(weight_and_bias("", qkv(ours), THIRDS), ("weight", "bias"), strict=True)]  # fmt: skip


def repeat(name: str, of: str) -> NameRow:
    """Row of a tensor that repeats another one."""
    return NameRow(name, reason=f"repeats {of}", rebuild=lambda made: made[of].clone(), optional=True)


def load_tensors(rows: list[NameRow], foreign: Tensors, where: str) -> Tensors:
    """Convert foreign tensors to ours. Raises CheckpointError for a foreign name that matches no row or two, an unused
    row, and a tensor of ours that is set twice. `fill` compares the shapes."""
    patterns = [_pattern(row) for row in rows]
    used, ours = set(), {}
    for name, tensor in foreign.items():
        hits = [(i, match) for i, pattern in enumerate(patterns) if (match := pattern.fullmatch(name))]
        if not hits:
            raise CheckpointError(f"{where}: unexpected tensor {name!r}")
        if len(hits) > 1:
            raise CheckpointError(f"{where}: tensor {name!r} matches {len(hits)} rows of the table")
        index, match = hits[0]
        used.add(index)
        row = rows[index]
        if row.reason:
            continue
        for target, value in zip(row.targets, _applied(row, tensor, name, where), strict=True):
            target = target.replace("{}", match.group(1)) if match.groups() else target
            if target in ours:
                raise CheckpointError(f"{where}: tensor {name!r} sets {target!r} a second time")
            ours[target] = value
    for index, row in enumerate(rows):
        if index not in used and not row.optional:
            raise CheckpointError(f"{where}: tensor {row.foreign!r} is missing")
    return ours


def check(rows: list[NameRow], model: Tensors, foreign: Tensors, where: str, of: str = "") -> None:
    """Raise CheckpointError for a foreign tensor that is missing, unexpected, misshapen or not finite. `model`: its
    state dict, which may be on the meta device. `of`: class of the foreign model."""
    expected = export_tensors(rows, model)
    for name in sorted(expected.keys() - foreign.keys()):
        if not any(row.optional and _pattern(row).fullmatch(name) for row in rows):
            raise CheckpointError(f"{where}: tensor {name!r} is missing" + (f" in {of}" if of else ""))
    for name in sorted(foreign.keys() - expected.keys()):
        if not any((row.reason or row.optional) and _pattern(row).fullmatch(name) for row in rows):
            raise CheckpointError(f"{where}: unexpected tensor {name!r}" + (f" of {of}" if of else ""))
    for name in sorted(expected.keys() & foreign.keys()):
        tensor, told = foreign[name], expected[name]
        if tensor.numel() == told.numel() == 1:  # a number in another shape fits if the row's op makes it so: see fill
            tensor = tensor.reshape(told.shape)
        if tensor.shape != told.shape:
            shapes = f"{list(tensor.shape)}, not {list(told.shape)}"
            raise CheckpointError(f"{where}: tensor {name!r} has shape {shapes}, as the configuration says")
        check_like(name, tensor, told, where)
    check_finite({name: foreign[name] for name in sorted(expected.keys() & foreign.keys())}, where)


def check_like(name: str, tensor: Tensor, expected: Tensor, where: str) -> None:
    """Raise CheckpointError unless shape and kind of number are as `expected`."""
    if tensor.shape != expected.shape:
        raise CheckpointError(f"{where}: tensor {name!r} has shape {list(tensor.shape)}, not {list(expected.shape)}")
    scaled = tensor.is_floating_point() and tensor.itemsize < 2  # 8 bits mean nothing without a scale
    if scaled or tensor.is_floating_point() != expected.is_floating_point():
        raise CheckpointError(f"{where}: tensor {name!r} holds {tensor.dtype}, not {expected.dtype}")


def check_finite(tensors: Tensors, where: str) -> None:
    """Raise CheckpointError for a tensor with a NaN or infinity. Reads all numbers, so check shapes first."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CheckpointError(f"{where}: tensor {name!r} holds values that are not finite")


def all_finite(tensor: Tensor) -> bool:
    """Return True if all values are finite. A finite sum proves it in a thirtieth of the time of `isfinite`; a sum may
    also overflow, so otherwise each value is tested."""
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite() or tensor.isfinite().all())


def _pattern(row: NameRow) -> re.Pattern[str]:
    return re.compile(re.escape(row.foreign).replace(r"\{\}", r"(\d+)"))


def _applied(row: NameRow, tensor: Tensor, name: str, where: str) -> list[Tensor]:
    try:
        made = row.op.load(tensor)
    except (RuntimeError, IndexError) as error:
        raise CheckpointError(f"{where}: tensor {name!r} has shape {list(tensor.shape)} ({error})") from None
    if len(made) != len(row.targets):
        raise CheckpointError(
            f"{where}: tensor {name!r} of shape {list(tensor.shape)} does not split in {len(row.targets)}"
        )
    return made


def export_tensors(rows: list[NameRow], ours: Tensors) -> Tensors:
    """Convert our tensors to foreign ones: the inverse of `load_tensors`. Raises CheckpointError for a tensor of ours
    without a row, and for a row without its tensor."""
    left, foreign = dict(ours), {}
    for row in rows:
        if row.reason:
            continue
        for layer in _layers(row, ours):
            names = [target.replace("{}", layer) for target in row.targets]
            if row.optional and not all(name in left for name in names):
                continue
            if missing := [name for name in names if name not in left]:
                raise CheckpointError(f"export: {row.foreign!r} needs {missing[0]!r}, which the model lacks")
            foreign[row.foreign.replace("{}", layer)] = row.op.export([left.pop(name) for name in names]).contiguous()
    if left:
        raise CheckpointError(f"export: tensor {next(iter(left))!r} has no row in the table")
    for row in rows:
        if row.rebuild:
            foreign[row.foreign] = row.rebuild(foreign)
    return foreign


def _layers(row: NameRow, ours: Tensors) -> list[str]:
    """Layer numbers for which the row's first target exists; [""] for a row without layers."""
    if "{}" not in row.targets[0]:
        return [""]
    pattern = re.compile(re.escape(row.targets[0]).replace(r"\{\}", r"(\d+)"))
    return [match.group(1) for name in ours if (match := pattern.fullmatch(name))]
