"""Language model data: streams cut into windows, or documents packed into rows.

Documents in a packed row attend to themselves alone and count positions from 0, so loss and gradient equal those of
separate rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multimodal.data.loader import Plan, generator
from multimodal.data.manifests import is_manifest, read_list, read_text
from multimodal.data.sources import TEXTS, USUAL, ListColumns
from multimodal.errors import DataError, UsageError
from multimodal.tokens.text.tokenizer import Tokenizer

IGNORED = -100  # target of a position without a loss
OPEN = 32  # rows filled at the same time

Split = Literal["none", "lines", "blank"]


def texts_in(path: Path, split: Split = "none") -> list[str]:
    """Read a file as one text, one document per line, or documents separated by blank lines; of a manifest each text is
    a document. Raises DataError for an empty file."""
    if is_manifest(path):
        parts = list(listed_texts(path))
    else:
        text = read_text(path)
        parts = {"none": [text], "lines": text.split("\n"), "blank": text.split("\n\n")}[split]
    found = [part if split == "none" else part.strip("\n") for part in parts if part.strip()]
    if not found:
        raise DataError(f"{path}: holds no text (0 characters)")
    return found


def listed_texts(path: Path, columns: ListColumns = USUAL) -> Iterator[str]:
    """Yield the texts of a manifest (JSON lines, CSV, TSV). Raises DataError, naming the line, for a row without."""
    for line in read_list(path):
        _, texts, fault = columns.label_and_texts(line.values)
        if line.fault or fault or not texts:
            wanted, got = [columns.text_column] if columns.text_column else TEXTS, ", ".join(line.values)[:200]
            absent = "no text" if {*wanted} & {*line.values} else f"expected a column {', '.join(wanted)} (got {got})"
            raise DataError(f"{path}: line {line.number}: {line.fault or fault or absent}")
        yield from texts


def training_texts(
    data: Sequence[Path], val: Sequence[Path], hold: float, split: Split = "none"
) -> tuple[list[str], list[str]]:
    """Read texts to train on and to validate with: those of `val`, or the last `hold` of `data`."""
    texts, own = ([text for path in paths for text in texts_in(path, split)] for paths in (data, val))
    return (texts, own) if val else held_out(texts, hold)


def held_out(texts: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Split off the last `share` of the documents for validation, or of each text's characters where a whole text would
    be more than that."""
    if len(texts) * share < 1:
        cut = [(text, int(len(text) * (1 - share))) for text in texts]
        parts = ([text[:at] for text, at in cut if at], [text[at:] for text, at in cut])
    else:
        at = int(len(texts) * (1 - share))
        parts = (list(texts[:at]), list(texts[at:]))
    if not all(any(part) for part in parts):
        raise UsageError(f"{share}: leaves nothing to train on, or nothing to validate with", argument="hold")
    return parts


def ends_of(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the tokens that begin and end a text, or the only one of them twice. Raises UsageError for a vocabulary
    without either, since nothing would predict a text's first token."""
    known = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    if not known:
        raise UsageError("has no token that begins or ends a text", argument="tokenizer")
    return known[0], known[-1]


@dataclass(frozen=True)
class TextCorpus:
    """Texts as ids: text i is `ids[ends[i]:ends[i + 1]]`. `characters`, `bytes`: totals of the texts."""

    ids: Int[Tensor, "N"]
    ends: list[int]
    characters: int
    bytes: int

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: Tokenizer) -> "TextCorpus":
        """Encode each text between the tokens of `ends_of`. Raises UsageError as that does, TextError for a text
        outside the vocabulary."""
        first, last = ends_of(tokenizer)
        rows, characters, size = [], 0, 0
        for text in texts:
            rows.append(torch.tensor([first, *tokenizer.encode(text), last], dtype=torch.int32))
            characters, size = characters + len(text), size + len(text.encode())
        starts = [0, *torch.tensor([len(row) for row in rows]).cumsum(0).tolist()]
        return cls(torch.cat(rows), starts, characters, size)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def text(self, number: int) -> Int[Tensor, "T"]:
        return self.ids[self.ends[number] : self.ends[number + 1]]


class TokenBatch(NamedTuple):
    """`targets`: the token after each id, IGNORED where no loss is taken. `documents` (-1: padding) and `places` are
    those of packed rows; `given` marks the ids of a prefix, which all see."""

    ids: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    documents: Int[Tensor, "B T"] | None = None
    places: Int[Tensor, "B T"] | None = None
    given: Bool[Tensor, "B T"] | None = None

    @property
    def padding(self) -> float | None:
        return None if self.documents is None else float((self.documents < 0).float().mean())


class Windows:
    """Source of windows of the stream of all texts: key k is the `context` + 1 tokens from k."""

    def __init__(self, corpus: TextCorpus, context: int):
        self.ids, self.context = corpus.ids, context
        if len(self.ids) <= context:
            raise DataError(f"{len(self.ids)} tokens of text do not fill more than one context of {context}")

    def __len__(self) -> int:
        return len(self.ids) - self.context

    def name(self, key: int) -> str:
        return f"tokens {key} to {key + self.context}"

    def read(self, key: int) -> list[Int[Tensor, "_"]]:
        return [self.ids[key : key + self.context + 1].long()]

    def plan(self, batch: int, seed: int) -> Plan:
        """Return a plan of adjacent windows in random order, with a new offset each epoch."""
        if len(self) < batch * self.context:
            raise DataError(f"{len(self.ids)} tokens are fewer than a batch of {batch} x {self.context}")

        def plan(epoch: int) -> list[list[int]]:
            random = generator(seed, epoch)
            first = int(torch.randint(self.context, (1,), generator=random))
            starts = torch.arange(first, len(self), self.context)
            order = starts[torch.randperm(len(starts), generator=random)].tolist()
            whole = range(0, max(1, len(order) - batch + 1), batch)
            return [order[i : i + batch] for i in whole]

        return plan


class Packed:
    """Source of packed rows: a key is the numbers of the pieces in one row. A document longer than a row is cut into
    pieces, each starting with the last token of the one before."""

    def __init__(self, corpus: TextCorpus, context: int):
        self.ids, self.context = corpus.ids, context
        self.pieces = [
            (start, min(start + context + 1, last))
            for first, last in zip(corpus.ends, corpus.ends[1:], strict=False)
            for start in range(first, last - 1, context)
        ]
        if not self.pieces:
            raise DataError("no document has two tokens or more")

    def __len__(self) -> int:
        return len(self.pieces)

    def name(self, key: tuple[int, ...]) -> str:
        return f"documents {', '.join(map(str, key))}"

    def read(self, key: tuple[int, ...]) -> list[Int[Tensor, "_"]]:
        return [self.ids[slice(*self.pieces[number])].long() for number in key]

    def plan(self, batch: int, seed: int) -> Plan:
        """Return a plan with each piece once per epoch, in random order, packed by best fit."""

        def plan(epoch: int) -> list[list[tuple[int, ...]]]:
            random = generator(seed, epoch)
            rows = self._rows(torch.randperm(len(self.pieces), generator=random).tolist())
            order = torch.randperm(len(rows), generator=random).tolist()
            whole = range(0, max(1, len(order) - batch + 1), batch)
            return [[tuple(rows[i]) for i in order[start : start + batch]] for start in whole]

        return plan

    def _rows(self, order: list[int]) -> list[list[int]]:
        done: list[list[int]] = []
        rows: list[tuple[int, list[int]]] = []  # free places, pieces
        for number in order:
            size = self.pieces[number][1] - self.pieces[number][0] - 1
            fits = [i for i, (free, _) in enumerate(rows) if free >= size]
            if fits:
                at = min(fits, key=lambda i: rows[i][0])
                rows[at] = (rows[at][0] - size, [*rows[at][1], number])
            else:
                if len(rows) == OPEN:
                    done.append(rows.pop(min(range(OPEN), key=lambda i: rows[i][0]))[1])
                rows.append((self.context - size, [number]))
        return done + [row for _, row in rows]


class PrepareTokens:
    """Prepares one row. `prefix`: a random first part of each document, one token up to all but the last, is not
    predicted. `repeat`: share of rows that repeat their start, an eighth to a half of them, from which induction heads
    are learned soon; a fixed length would teach heads to look back by it."""

    def __init__(self, context: int, prefix: bool = False, packed: bool = False, repeat: float = 0.0):
        self.context, self.prefix, self.packed, self.repeat = context, prefix, packed, repeat

    def __call__(self, pieces: list[Int[Tensor, "_"]], random: torch.Generator) -> TokenBatch:
        if self.repeat and float(torch.rand((), generator=random)) < self.repeat:
            share = 0.125 + 0.375 * float(torch.rand((), generator=random))
            pieces = [piece[torch.arange(len(piece)) % max(1, int(share * len(piece)))] for piece in pieces]
        ids, targets = torch.zeros(self.context, dtype=torch.long), torch.full((self.context,), IGNORED)
        documents, places = torch.full((self.context,), -1), torch.zeros(self.context, dtype=torch.long)
        given, at = torch.zeros(self.context, dtype=torch.bool), 0
        for number, piece in enumerate(pieces):
            size = len(piece) - 1
            here = slice(at, at + size)
            ids[here], targets[here] = piece[:-1], piece[1:]
            documents[here], places[here] = number, torch.arange(size)
            if self.prefix:
                seen = int(torch.randint(1, size + 1, (1,), generator=random))
                given[at : at + seen] = True
                targets[at : at + seen - 1] = IGNORED
            at += size
        packed = (documents, places) if self.packed else (None, None)
        return TokenBatch(ids, targets, *packed, given if self.prefix else None)
