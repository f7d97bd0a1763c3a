"""Labelled texts: reading tables of them, and batches for a classifier."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from multimodal.data.batching import PaddedText, pad_text
from multimodal.data.datasets.documents import read_rows
from multimodal.data.examples import SizedExamples
from multimodal.data.manifests import JSONL, ending, read_list
from multimodal.data.sources import USUAL, ListColumns
from multimodal.errors import DataError, few
from multimodal.tokens.text.tokenizer import Tokenizer

HEADERS = (("sentence", "label"), ("text", "label"))  # GLUE's and the usual one, in any order
NUMBERS = ("idx", "index", "id")  # columns beside these
MOST_LABELS = 20  # of which most may occur once, as in a trial with few rows


class LabelledText(NamedTuple):
    text: str
    label: str


def read_labelled(path: Path, columns: tuple[str, str] | None = None) -> list[LabelledText]:
    """Texts and labels of a list (.csv, .json, .jsonl) by the names of its `columns` of text and label, else the usual
    ones; of any other file as a table with tabs, see `_read_table`. Raises DataError naming the line."""
    if ending(path) not in (".csv", *JSONL):
        return _read_table(path, columns)
    named, rows = USUAL if columns is None else ListColumns(None, *columns), []
    for line in read_list(path):
        label, texts, fault = named.label_and_texts(line.values)
        lacks = " and ".join(["a text"] * (len(texts) != 1) + ["a label"] * (label is None))
        absent = lacks and f"expected {lacks} (columns: {', '.join(line.values):.200})"
        if fault := line.fault or fault or absent:
            raise DataError(f"{path}: line {line.number}: {fault}")
        rows.append(LabelledText(texts[0].strip(), str(label)))
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def _read_table(path: Path, columns: tuple[str, str] | None) -> list[LabelledText]:
    """Rows of a table with tabs between its columns, gzip or not: the `columns` of text and label that its header
    names; without them the first and the last column, and no header but one of `HEADERS`, with a column of `NUMBERS` or
    without. Raises DataError naming the line, also for a first line that looks like another header."""
    lines = read_rows(path)
    header = [cell.strip() for cell in lines[0][1]]
    text, label = 0, -1
    if columns is None:
        columns = next((names for names in HEADERS if sorted({*header} - {*NUMBERS}) == sorted(names)), None)
    if columns is not None:
        if absent := [name for name in columns if name not in header]:
            raise DataError(f"{path}: has no column {absent[0]} ({', '.join(header)})")
        text, label = (header.index(name) for name in columns)
    width = len(header)
    rows = lines if columns is None else lines[1:]
    if not rows:
        raise DataError(f"{path}: has no rows below its header")
    for number, row in rows:
        if len(row) != width or width < 2:
            raise DataError(f"{path}: line {number} has {len(row)} columns, not {max(width, 2)}")
        if not row[label].strip():
            raise DataError(f"{path}: line {number} has no label")
    texts = [LabelledText(row[text].strip(), row[label].strip()) for _, row in rows]
    if rows is lines and _begins_with_header(texts):
        problem = f"line 1 looks like a header, since no other line has the label {texts[0].label!r:.40}"
        raise DataError(f"{path}: {problem}; name the columns of text and label, or begin with a line text⇥label")
    return texts


def _begins_with_header(rows: Sequence[LabelledText]) -> bool:
    """True if only the first row has its label and nearly all other labels occur again, two at least."""
    counts = Counter(row.label for row in rows)
    once = sum(count == 1 for count in counts.values())
    return counts[rows[0].label] == 1 and len(counts) > 2 and 100 * (once - 1) <= len(rows)


def classes_of(rows: Sequence[LabelledText], path: Path) -> list[str]:
    """The labels in order. Raises DataError where there are fewer than two, or many of which most occur once."""
    counts = Counter(row.label for row in rows)
    found = sorted(counts)
    if len(found) < 2:
        raise DataError(f"{path}: has one label only ({found[0]})")
    once = sum(count == 1 for count in counts.values())
    if len(found) > MOST_LABELS and 2 * once > len(found):
        problem = f"{once} of {len(found)} labels occur once, so these are texts or numbers, not classes"
        raise DataError(f"{path}: {problem} ({few(found, 3)})")
    return found


class ClassExample(NamedTuple):
    ids: list[int]
    label: int


@dataclass(frozen=True)
class ClassBatch(PaddedText):
    labels: Int[Tensor, "B"]


class LabelledTexts(SizedExamples[ClassExample]):
    """Labelled texts as the loader's source, framed as the tokenizer frames texts; `cut` counts those that are longer
    than `context`. Raises DataError for a label outside `labels`."""

    def __init__(
        self, rows: Sequence[LabelledText], tokenizer: Tokenizer, labels: Sequence[str], context: int, where: str
    ):
        index = {label: number for number, label in enumerate(labels)}
        if wrong := [row.label for row in rows if row.label not in index]:
            problem = f"label {wrong[0]!r:.40} is not among the training texts' labels ({few(labels)})"
            raise DataError(f"{where}: {problem}")
        start, end = tokenizer.frame
        room = context - len(start) - len(end)
        whole = [tokenizer.encode(row.text) for row in rows]
        self.cut = sum(len(ids) > room for ids in whole)
        self.rows = rows
        examples = [
            ClassExample([*start, *tokenizer.kept(ids, room), *end], index[row.label])
            for ids, row in zip(whole, rows, strict=True)
        ]
        super().__init__(examples, [len(one.ids) for one in examples], "text")

    def name(self, key: int) -> str:
        return f"text {key} ({self.rows[key].text[:40]})"


@dataclass(frozen=True)
class CollateClassed:
    """`context`: no row gets longer than it by its padding."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[ClassExample]) -> ClassBatch:
        text = pad_text([example.ids for example in examples], self.pad_id, limit=self.context)
        return ClassBatch(text.ids, text.lengths, torch.tensor([example.label for example in examples]))
