"""Texts whose words have tags: files in CoNLL's format or JSON lines, and their tokens for a classifier of tokens."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from multimodal.data.batching import PaddedText, pad_rows, pad_text
from multimodal.data.datasets.annotated.rows import json_rows, not_empty
from multimodal.data.datasets.text import IGNORED
from multimodal.data.examples import SizedExamples
from multimodal.data.manifests import is_json, read_text
from multimodal.errors import DataError
from multimodal.tokens.text.pieces import overlapping
from multimodal.tokens.text.tokenizer import Piece, Tokenizer

OUTSIDE = "O"
DOCUMENT = "-DOCSTART-"  # CoNLL's mark between documents


class TaggedText(NamedTuple):
    """`where`: file and line."""

    words: list[str]
    tags: list[str]
    where: str

    @property
    def text(self) -> str:
        return " ".join(self.words)


def read_tagged(path: Path) -> list[TaggedText]:
    """Texts of a .jsonl file (objects with equally long lists "tokens" and "tags"), or of one in CoNLL's format: a word
    a line with its tag in the last column, an empty line between texts.

    Raises DataError naming the line: a word without a tag, lists of unlike length, an I- that no B- or I- of its kind
    comes before (IOB2), no text."""
    texts = list(_objects(path) if is_json(path) else _columns(path))
    not_empty(texts, path)
    for text in texts:
        for number, (before, tag) in enumerate(pairwise([OUTSIDE, *text.tags]), 1):
            if tag.startswith("I-") and before not in (tag, f"B-{tag[2:]}"):
                raise DataError(
                    f"{text.where}: word {number} has {tag!r:.40} after {before!r:.40}; an entity begins with B- (IOB2)"
                )
    return texts


def _objects(path: Path) -> Iterator[TaggedText]:
    for row in json_rows(path):
        words, tags = row.texts("tokens"), row.texts("tags")
        if len(words) != len(tags) or not words:
            raise DataError(f"{row.where}: has {len(words)} tokens and {len(tags)} tags")
        yield TaggedText(words, tags, row.where)


def _columns(path: Path) -> Iterator[TaggedText]:
    words: list[list[str]] = []
    first, width = 1, 0
    for number, line in enumerate([*read_text(path).split("\n"), ""], 1):
        cells = line.split()
        if cells and cells[0] != DOCUMENT:
            width = width or len(cells)
            if len(cells) != width or width < 2:
                raise DataError(f"{path}: line {number} has {len(cells)} columns, not {max(width, 2)} (word and tag)")
            first = first if words else number
            words.append(cells)
        elif words:
            yield TaggedText([row[0] for row in words], [row[-1] for row in words], f"{path}: line {first}")
            words = []


def tags_of(texts: Sequence[TaggedText], path: Path) -> list[str]:
    """The tags, that of no entity first. Raises DataError where there are fewer than two."""
    found = sorted({tag for text in texts for tag in text.tags}, key=lambda tag: (tag != OUTSIDE, tag))
    if len(found) < 2:
        raise DataError(f"{path}: has one tag only ({found[0]})")
    return found


def first_pieces(text: TaggedText, pieces: Sequence[Piece]) -> list[int]:
    """The number of the word that each token begins; -1 for the others (Devlin et al. 2019, section 5.3)."""
    starts = [0]
    for word in text.words[:-1]:
        starts.append(starts[-1] + len(word) + 1)
    words = [bisect_right(starts, piece.start) - 1 if piece.end > piece.start else -1 for piece in pieces]
    return [word if word not in words[:at][-1:] else -1 for at, word in enumerate(words)]


class TagExample(NamedTuple):
    ids: list[int]
    targets: list[int]


@dataclass(frozen=True)
class TagBatch(PaddedText):
    targets: Int[Tensor, "B T"]


class TaggedTexts(SizedExamples[TagExample]):
    """Tagged texts as the loader's source; one longer than `context` is several examples. Raises DataError for a tag
    outside `labels`."""

    def __init__(self, texts: Sequence[TaggedText], tokenizer: Tokenizer, labels: Sequence[str], context: int):
        index = {label: number for number, label in enumerate(labels)}
        start, end = tokenizer.frame
        room, blank = context - len(start) - len(end), [IGNORED]
        examples: list[TagExample] = []
        for text in texts:
            if wrong := [tag for tag in text.tags if tag not in index]:
                known = ", ".join(labels)
                raise DataError(f"{text.where}: tag {wrong[0]!r:.40} is not among the training texts' tags ({known})")
            pieces = tokenizer.pieces(text.text)
            words = first_pieces(text, pieces)
            targets = [index[text.tags[word]] if word >= 0 else IGNORED for word in words]
            for a, b in overlapping(len(pieces), room, 0):
                ids = [*start, *(piece.id for piece in pieces[a:b]), *end]
                examples.append(TagExample(ids, [*blank * len(start), *targets[a:b], *blank * len(end)]))
        super().__init__(examples, [len(one.ids) for one in examples], "text")


@dataclass(frozen=True)
class CollateTagged:
    """`context`: limit of the padded length."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[TagExample]) -> TagBatch:
        text = pad_text([one.ids for one in examples], self.pad_id, limit=self.context)
        targets = pad_rows([one.targets for one in examples], IGNORED, limit=self.context)
        return TagBatch(text.ids, text.lengths, torch.as_tensor(targets))
