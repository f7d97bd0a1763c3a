"""Foreign weights as a table: a total, strict and invertible map between a family's tensor names and ours."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.errors import CheckpointError

Tensors = dict[str, Tensor]


class Op(NamedTuple):
    """`load` makes our tensors from the foreign one; `export` is its exact inverse."""

    load: Callable[[Tensor], list[Tensor]]
    export: Callable[[list[Tensor]], Tensor]


COPY = Op(lambda t: [t], lambda ours: ours[0])
TRANSPOSE = Op(lambda t: [t.T], lambda ours: ours[0].T)  # x @ W, as GPT-2's Conv1D and CLIP's projections
THIRDS = Op(lambda t: list(t.chunk(3)), torch.cat)  # fused query, key, value
FIRST = Op(lambda t: [t[None]], lambda ours: ours[0][0])  # ours has a leading axis of 1
NO_FIRST = Op(lambda t: [t[0]], lambda ours: ours[0][None])  # theirs has a leading axis of 1
NO_LAST = Op(lambda t: [t[..., 0]], lambda ours: ours[0][..., None])  # a pointwise convolution is a linear map
SCALAR = Op(lambda t: [t.reshape(())], lambda ours: ours[0].reshape(1))


@dataclass(frozen=True)
class Row:
    """One foreign name and ours; `{}` stands for the layer number in all of them.

    A row with `reason` drops the foreign tensor; `rebuild` makes it again from the foreign tensors exported so
    far. `optional`: files exist without it."""

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
            raise ValueError(f"row {self.foreign!r} needs either our names or a reason to drop it")


def under(prefix: str, ours: str, rows: list[Row]) -> list[Row]:
    """The rows with `prefix` before each foreign name and `ours` before each of ours."""
    from dataclasses import replace

    return [replace(row, foreign=prefix + row.foreign, ours=tuple(ours + t for t in row.targets)) for row in rows]


def weight_and_bias(foreign: str, ours: tuple[str, ...] | str, op: Op = COPY) -> list[Row]:
    """The two rows of a linear map or a norm."""
    names = (ours,) if isinstance(ours, str) else ours
    return [Row(f"{foreign}.{part}", tuple(f"{n}.{part}" for n in names), op) for part in ("weight", "bias")]


def load_tensors(rows: list[Row], foreign: Tensors, where: str) -> Tensors:
    """Our tensors. Raises CheckpointError when a foreign name matches no row or two, when a row is not used, or
    when one of ours would be set twice. Shapes are compared when the model is filled."""
    patterns = [_pattern(row) for row in rows]
    used, ours = set(), {}
    for name, tensor in foreign.items():
        hits = [(i, match) for i, pattern in enumerate(patterns) if (match := pattern.fullmatch(name))]
        if not hits:
            raise CheckpointError(f"{where}: tensor {name!r} is not of this model")
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


def check(rows: list[Row], model: Tensors, foreign: Tensors, where: str) -> None:
    """Raises CheckpointError naming, as the file does, a tensor that is missing, misshapen, not finite or one too
    many for the model. `model`: its state, which may be on the meta device."""
    expected = export_tensors(rows, model)
    for name in expected.keys() - foreign.keys():
        if not any(row.optional and _pattern(row).fullmatch(name) for row in rows):
            raise CheckpointError(f"{where}: tensor {name!r} is missing")
    for name in foreign.keys() - expected.keys():
        if not any(row.reason and _pattern(row).fullmatch(name) for row in rows):
            raise CheckpointError(f"{where}: tensor {name!r} is not of this model")
    for name in expected.keys() & foreign.keys():
        if (has := list(foreign[name].shape)) != (wants := list(expected[name].shape)):
            raise CheckpointError(f"{where}: tensor {name!r} has shape {has}, not {wants}")
        if foreign[name].is_floating_point() != expected[name].is_floating_point():
            raise CheckpointError(f"{where}: tensor {name!r} holds {foreign[name].dtype}, not {expected[name].dtype}")
    check_finite({name: foreign[name] for name in expected.keys() & foreign.keys()}, where)


def check_finite(tensors: Tensors, where: str) -> None:
    """Raises CheckpointError naming a tensor with a value that is not finite. Reads every number: shapes come first."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CheckpointError(f"{where}: tensor {name!r} holds values that are not finite")


def all_finite(tensor: Tensor) -> bool:
    """Of floats; of other numbers True. What is not finite stays so in a sum, which takes a thirtieth of the time that
    looking at each takes; a sum that overflows says nothing."""
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite() or tensor.isfinite().all())


def _pattern(row: Row) -> re.Pattern[str]:
    return re.compile(re.escape(row.foreign).replace(r"\{\}", r"(\d+)"))


def _applied(row: Row, tensor: Tensor, name: str, where: str) -> list[Tensor]:
    try:
        made = row.op.load(tensor)
    except (RuntimeError, IndexError) as error:
        raise CheckpointError(f"{where}: tensor {name!r} has shape {list(tensor.shape)} ({error})") from None
    if len(made) != len(row.targets):
        raise CheckpointError(
            f"{where}: tensor {name!r} of shape {list(tensor.shape)} does not split in {len(row.targets)}"
        )
    return made


def export_tensors(rows: list[Row], ours: Tensors) -> Tensors:
    """The foreign tensors: the inverse of `load_tensors`. Raises CheckpointError for one of ours without a row, and
    for a row that asks for one that the model has not."""
    left, foreign = dict(ours), {}
    for row in rows:
        if row.reason:
            continue
        for layer in _layers(row, ours):
            names = [target.replace("{}", layer) for target in row.targets]
            if row.optional and not all(name in left for name in names):
                continue
            if missing := [name for name in names if name not in left]:
                raise CheckpointError(f"export: {row.foreign!r} needs {missing[0]!r}, which the model has not")
            foreign[row.foreign.replace("{}", layer)] = row.op.export([left.pop(name) for name in names]).contiguous()
    if left:
        raise CheckpointError(f"export: tensor {next(iter(left))!r} has no row in the table")
    for row in rows:
        if row.rebuild:
            foreign[row.foreign] = row.rebuild(foreign)
    return foreign


def _layers(row: Row, ours: Tensors) -> list[str]:
    """The layer numbers for which the row's first target exists; one empty one for a row without layers."""
    if "{}" not in row.targets[0]:
        return [""]
    pattern = re.compile(re.escape(row.targets[0]).replace(r"\{\}", r"(\d+)"))
    return [match.group(1) for name in ours if (match := pattern.fullmatch(name))]
