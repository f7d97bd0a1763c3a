"""Tables: reading, splitting and encoding."""

import csv
import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.loader import generator
from multimodal.data.manifests import read_text
from multimodal.errors import CheckpointError, DataError, few

log = logging.getLogger(__name__)

MISSING = ("", "?")
NOT_AVAILABLE = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None")  # among numbers; elsewhere a category
MOSTLY = 0.9  # share of numbers from which a column of categories is suspicious
LARGEST = torch.finfo(torch.float32).max
MOST_KINDS = 20  # a numeric target with more distinct values is regression

Table = dict[str, list[str]]  # columns as text, all of one length


def read_table(path: Path, names: Sequence[str] = (), target: str | None = None) -> Table:
    """Read the columns of a plain or gzip CSV file with a header line, or without one under `names`.

    Raises DataError for a file that is unreadable, empty, has a row of another length, has a header though `names` are
    given, or lacks the column `target` or a cell of it."""
    text = read_text(path)
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
    numbered = ((rows.line_num, [cell.strip() for cell in row]) for row in rows)
    try:
        filled = [(line, row) for line, row in numbered if any(row)]
    except csv.Error as error:
        raise DataError(f"{path}: line {rows.line_num}: not CSV ({error})") from None
    header = list(names) or (filled.pop(0)[1] if filled else [])
    if not filled:
        raise DataError(f"{path}: has no rows ({len(text)} characters)")
    if names and set(filled[0][1]) == set(names):
        problem = f"line {filled[0][0]} is a header: names of columns are for a file without one"
        raise DataError(f"{path}: {problem} (got {', '.join(names)})")
    if len(set(header)) < len(header):
        raise DataError(f"{path}: duplicate column ({', '.join(header)})")
    for line, row in filled:
        if len(row) != len(header):
            raise DataError(f"{path}: line {line} has {len(row)} columns, not {len(header)} (separated by commas)")
    table = {name: [row[i] for _, row in filled] for i, name in enumerate(header)}
    if target is not None and target not in table:
        raise DataError(f"{path}: lacks the column {target} ({', '.join(table)})")
    cells = table.get(target, [])
    absent = missing(cells)
    if empty := [line for (line, _), cell in zip(filled, cells, strict=False) if cell in absent]:
        raise DataError(f"{path}: line {empty[0]} has no value in the column {target} ({len(empty)} such lines)")
    return table


def part(table: Table, rows: Sequence[int]) -> Table:
    return {name: [column[i] for i in rows] for name, column in table.items()}


def split(table: Table, shares: Sequence[float], seed: int) -> list[Table]:
    """Split a shuffled table by shares; the last part gets the rest."""
    count = len(next(iter(table.values())))
    order = torch.randperm(count, generator=generator("split", seed)).tolist()
    edges = [0, *(round(count * sum(shares[: i + 1])) for i in range(len(shares) - 1)), count]
    parts = [part(table, order[a:b]) for a, b in pairwise(edges)]
    if not all(next(iter(one.values())) for one in parts):
        raise DataError(f"holds {count} rows, too few for parts of {', '.join(map(str, shares))}", argument="data")
    return parts


def _number(text: str) -> float:
    """Parse a number in float32's range, else NaN."""
    try:
        value = math.nan if "_" in text else float(text)  # Python groups digits by "_"
    except ValueError:
        return math.nan
    return value if abs(value) <= LARGEST else math.nan


def missing(cells: Iterable[str]) -> tuple[str, ...]:
    """The cells of a column without a value: NA and its like too if all others are numbers."""
    found = set(cells) - {*MISSING, *NOT_AVAILABLE}
    return (*MISSING, *NOT_AVAILABLE) if all(math.isfinite(_number(cell)) for cell in found) else MISSING


@dataclass(frozen=True)
class Columns:
    """Columns of a table, from its training part: numbers, categories (in order of their ids from 1), and the target, a
    number unless it has `labels`."""

    target: str
    numbers: tuple[str, ...]
    categories: Mapping[str, Sequence[str]]
    labels: Sequence[str] = ()

    @classmethod
    def of(cls, table: Table, target: str, predict: str | None = None) -> "Columns":
        """`predict`: number or class; None: a number if the target has over 20 numeric values. Raises DataError."""
        if target not in table:
            raise DataError(f"{target}: no such column ({', '.join(table)})", argument="target")
        absent = missing(table[target])
        kinds = sorted(set(table[target]) - {*absent})
        if predict is None:
            numeric = all(math.isfinite(_number(cell)) for cell in kinds) and len(kinds) > MOST_KINDS
            predict = "number" if numeric else "class"
        if len(kinds) < 2:
            raise DataError(f"{target}: has one value only ({', '.join(kinds) or 'none'})", argument="target")
        columns = {name: sorted(set(cells) - {*missing(cells)}) for name, cells in table.items() if name != target}
        numbers = [name for name, cells in columns.items() if cells and not any(math.isnan(_number(c)) for c in cells)]
        others = {name: cells for name, cells in columns.items() if name not in numbers and cells}
        if empty := [name for name, cells in columns.items() if not cells]:
            log.info("columns without values are dropped: %s", ", ".join(empty))
        if not numbers and not others:
            raise DataError(f"{target}: no other column has values to predict it from", argument="target")
        for name in (*others, *([target] if predict == "class" else [])):
            _warn_of_numbers(name, table[name])
        for name in numbers:
            _warn_of_digits(name, columns[name])
        return cls(target, tuple(numbers), others, tuple(kinds) if predict == "class" else ())

    @classmethod
    def from_card(cls, card: Mapping[str, Any], where: str) -> "Columns":
        """Raises CheckpointError for a card without columns."""
        try:
            found = card["table"]
            return cls(found["target"], tuple(found["numbers"]), dict(found["categories"]), tuple(found["labels"]))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{where}: its card has no columns") from None

    def card(self) -> dict[str, Any]:
        return asdict(self)


def _warn_of_numbers(name: str, cells: Sequence[str]) -> None:
    """Warn of a column that one unreadable cell would turn into categories."""
    given = [cell for cell in cells if cell not in (*MISSING, *NOT_AVAILABLE)]
    words = [cell for cell in given if not math.isfinite(_number(cell))]
    if words and len(words) <= (1 - MOSTLY) * len(given):
        log.warning("column %s is taken as categories, though %d of %d cells are numbers; not so %r",
                    name, len(given) - len(words), len(given), words[0][:40])  # fmt: skip


def _warn_of_digits(name: str, cells: Sequence[str]) -> None:
    """Warn of numbers that float32 rounds by more than a hundredth of their mean deviation."""
    numbers = torch.tensor([_number(cell) for cell in cells], dtype=torch.float64)
    errors = (numbers.float() - numbers).abs()
    if len(cells) > 1 and errors.max() > 0.01 * (numbers - numbers.mean()).abs().mean():
        worst = int(errors.argmax())
        log.warning("column %s is rounded to 32-bit numbers, %s to %.12g: subtract a constant from all its cells",
                    name, cells[worst], float(numbers[worst].float()))  # fmt: skip


class TableData(NamedTuple):
    """`targets`: numbers or classes; None if the table has no such column."""

    numbers: Float[Tensor, "N F"]
    categories: Int[Tensor, "N C"]
    targets: Tensor | None


def encode(table: Table, columns: Columns, where: str) -> TableData:
    """Encode a table. Missing numbers, NA and its like become NaN; missing and unknown categories become 0. Both are
    logged.

    Raises DataError for a missing column, a cell that is not a number, or an unknown label."""
    if absent := [name for name in (*columns.numbers, *columns.categories) if name not in table]:
        raise DataError(f"{where}: lacks the column {absent[0]} ({', '.join(table)})")
    count = len(next(iter(table.values())))
    numbers = torch.full((count, len(columns.numbers)), math.nan)
    for i, name in enumerate(columns.numbers):
        cells = table[name]
        numbers[:, i] = torch.tensor([_number(cell) for cell in cells], dtype=torch.float32)
        if wrong := [cell for cell in cells if cell not in (*MISSING, *NOT_AVAILABLE) and math.isnan(_number(cell))]:
            raise DataError(f"{where}: column {name} must hold numbers up to 3.4e38, got {wrong[0]!r:.40}")
    ids = torch.zeros(count, len(columns.categories), dtype=torch.long)
    unknown: set[str] = set()
    for i, (name, known) in enumerate(columns.categories.items()):
        index = {cell: number for number, cell in enumerate(known, 1)}
        ids[:, i] = torch.tensor([index.get(cell, 0) for cell in table[name]])
        unknown |= {f"{name} {cell}" for cell in set(table[name]) - set(known) - set(MISSING)}
    empty = int(numbers.isnan().sum()), sum(cell in MISSING for name in columns.categories for cell in table[name])
    log.info("%s: %d rows; missing: %d numbers, %d categories", where, count, *empty)
    if unknown:
        log.warning("%s: categories not in the training part: %s", where, ", ".join(sorted(unknown)[:5]))
    return TableData(numbers, ids, _targets(table, columns, where))


def _targets(table: Table, columns: Columns, where: str) -> Tensor | None:
    if columns.target not in table:
        return None
    cells = table[columns.target]
    if not columns.labels:
        found = torch.tensor([_number(cell) for cell in cells], dtype=torch.float64)  # of all their digits
        if found.isnan().any():
            raise DataError(f"{where}: column {columns.target} must hold numbers up to 3.4e38, got "
                            f"{cells[int(found.isnan().int().argmax())]!r:.40}")  # fmt: skip
        return found
    index = {cell: number for number, cell in enumerate(columns.labels)}
    # Adult's test file has a full stop after each label
    cells = [cell if cell in index else cell.removesuffix(".") for cell in cells]
    if wrong := [cell for cell in cells if cell not in index]:
        rare = "; a class of few rows may fall into one part of a split"
        raise DataError(f"{where}: label {wrong[0]!r:.40} is not in the training part ({few(columns.labels)}){rare}")
    return torch.tensor([index[cell] for cell in cells])
