"""What every text tokenizer is: text to ids and back, and padded batches that say what they cut."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multimodal.errors import CheckpointError, MultimodalError, TextError
from multimodal.system.files import read_json, shown, write_whole
from multimodal.system.records import checked as checked_value

RECORD = "tokenizer_config.json"


class TextCut(UserWarning):
    """A text was longer than the model takes, and its end was cut off."""


class TextBatch(NamedTuple):
    """Padded ids; `mask` is True on real tokens (never infer it from the pad id: CLIP's 0 is also "!")."""

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    cut: list[int]  # tokens cut from each text


class Tokenizer(ABC):
    """Base of all tokenizers. `encode` gives plain ids only: no text that a user types becomes a control id.

    A subclass sets the ids below and writes `_encode`, `_decode` and `save`.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None = None
    eos_id: int | None = None
    mask_id: int | None = None  # stands for a token that a model is to guess
    language_ids: Mapping[str, int] = MappingProxyType({})  # of each language the id of its token, for translation
    language_in_source: bool = False  # whether the one asked for stands before the source, and not before the answer
    sentinel_ids: tuple[int, ...] = ()  # stand for masked spans, the first first
    control: frozenset[int] = frozenset()  # ids that no text yields
    context: int | None = None  # the length a batch is cut to when none is given
    pad_to_length: bool = False  # whether a batch is padded to that length, or only to its longest text

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Plain ids of a text that UTF-8 can hold."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ids that all lie in the vocabulary."""

    @abstractmethod
    def save(self, folder: Path | str) -> None:
        """Write what `tokenizer_from(folder)` needs, as data only."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with no control id among them. Raises TextError on a lone surrogate."""
        return self._encode(checked(text))

    def decode(self, ids: Sequence[int], skip_control: bool = True) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Raises TextError on an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise TextError(f"token id {wrong[0]} lies outside the vocabulary of {self.vocab_size}")
        return self._decode([i for i in ids if not (skip_control and i in self.control)])

    def pair(
        self, first: str | Sequence[int], second: str | Sequence[int], length: int | None = None, ends: int = 1
    ) -> tuple[list[int], list[int]]:
        """Ids and segments of two texts, or of their ids, in one row: bos first eos second eos, the second text and
        the last eos in segment 1 (Devlin et al. 2019, figure 2). `ends`: how many eos stand between them (RoBERTa: 2).

        Of a row longer than `length` (default: the tokenizer's `context`) the longer text loses its end, and where both
        are too long the second keeps at most one token more; one TextCut warning says so. Raises TextError."""
        start, end = ([] if i is None else [i] for i in (self.bos_id, self.eos_id))
        a, b = (self.encode(text) if isinstance(text, str) else list(text) for text in (first, second))
        length = self.context if length is None else length
        room = len(a) + len(b) if length is None else length - len(start) - (ends + 1) * len(end)
        if room < 0:
            raise TextError(f"a length of {length} tokens leaves no room for the control tokens")
        if (lost := len(a) + len(b) - room) > 0:
            warnings.warn(TextCut(f"a pair of texts is cut to {length} tokens, {lost} lost"), stacklevel=2)
            keep = max(room // 2, room - len(b)) if len(a) <= len(b) else max((room + 1) // 2, room - len(b))
            a = a[: min(len(a), keep)]
            b = b[: room - len(a)]
        before, after = start + a + end * ends, b + end
        return before + after, [0] * len(before) + [1] * len(after)

    def batch(self, texts: Sequence[str], length: int | None = None, pad_to_length: bool | None = None) -> TextBatch:
        """Ids [B T] of texts between bos and eos (those the vocabulary has), with mask and cut counts.

        `length` (tokens, bos and eos included; default: the tokenizer's `context`) is the most a row may hold.
        Rows are padded to the longest text, or to `length` with `pad_to_length`. A cut row keeps its eos as last
        token, and one TextCut warning a batch says what was lost.
        """
        if isinstance(texts, str) or not texts:
            raise TextError(f"a batch needs a list of at least one text, got {texts!r:.40}")
        length = self.context if length is None else length
        pad_to_length = self.pad_to_length if pad_to_length is None else pad_to_length
        start, end = ([] if i is None else [i] for i in (self.bos_id, self.eos_id))
        room = None if length is None else length - len(start) - len(end)
        if room is not None and (room < 0 or length == 0):
            raise TextError(f"a length of {length} tokens leaves no room for the control tokens")
        if pad_to_length and length is None:
            raise TextError("pad_to_length needs a length")
        full = [self.encode(text) for text in texts]
        rows = [start + ids[:room] + end for ids in full]
        cut = [len(ids) - room if room is not None and len(ids) > room else 0 for ids in full]
        warn_of_cut(texts, cut, length)
        return TextBatch(*_padded(rows, length if pad_to_length else None, self.pad_id), cut)


def _padded(rows: list[list[int]], width: int | None, pad_id: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Ids and mask; `width` None: that of the longest row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    mask = np.arange(lengths.max() if width is None else width) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    return torch.from_numpy(ids), torch.from_numpy(mask)


def warn_of_cut(texts: Sequence[str], cut: Sequence[int], length: int | None) -> None:
    """One TextCut warning for all texts, if any lost tokens; it is the caller's caller that is warned."""
    first = next((i for i, lost in enumerate(cut) if lost), None)
    if first is None:
        return
    others = sum(lost > 0 for lost in cut) - 1
    more = f"; {others} more of {len(texts)} texts were cut too" if others else ""
    message = f"text {texts[first][:40]!r} is cut to {length} tokens, {cut[first]} lost{more}"
    warnings.warn(TextCut(message), stacklevel=3)


def texts_of(values: Any, name: str, error: type[MultimodalError] = TextError) -> list[str]:
    """A list of texts, given as any sequence of them. Raises `error` with the argument's `name` and the value."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise error(f"{name}: expected a list of texts ({shown(values)})")
    found = list(values)
    for number, text in enumerate(found, 1):
        if not isinstance(text, str):
            raise error(f"{name}: number {number} of {len(found)}: expected a text ({shown(text)})")
    return found


def checked(text: str) -> str:
    """The text, if it is one that UTF-8 can hold; else TextError (a lone surrogate is half a character)."""
    if not isinstance(text, str):
        raise TextError(f"expected a text ({shown(text)})")
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"text {text[:40]!r} has a lone surrogate at character {error.start}") from None
    return text


def write_record(folder: Path | str, record: dict[str, Any]) -> None:
    """Write the tokenizer record of a checkpoint folder."""
    write_text(Path(folder) / RECORD, json.dumps(record, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """A file of a tokenizer's folder, which is made where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def read_record(folder: Path | str) -> dict[str, Any]:
    """The tokenizer record of a checkpoint folder, as `write_record` left it."""
    return read_json(Path(folder) / RECORD)


def require_keys(record: dict[str, Any], types: dict[str, Any], where: Path) -> None:
    """Hold a record to exactly these keys and types, those of `tokens.records`; CheckpointError names the first
    fault."""
    if unknown := sorted(set(record) - set(types)):
        raise CheckpointError(f"{where / RECORD}: unknown key {unknown[0]!r}")
    for key, kind in types.items():
        if key not in record:
            raise CheckpointError(f"{where / RECORD}: key {key!r} is missing")
        checked_value(kind, record[key], f"{where / RECORD}: {key}")
