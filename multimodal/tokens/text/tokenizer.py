"""Base class of text tokenizers: text to ids and back, and padded batches that report truncation."""

import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from multimodal.errors import CheckpointError, MultimodalError, TextError
from multimodal.system.files import shown, write_whole
from multimodal.system.records import checked as checked_value

RECORD = "tokenizer_config.json"
MARK = "\ufdd0"  # a noncharacter: no text has it
FLAGS = ("cuts_left", "cleans")  # of any tokenizer; its record lists those that are on
# transformers' `clean_up_tokenization`
CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " 's": "'s",
           " 've": "'ve", " 're": "'re"}  # fmt: skip


class TextCut(UserWarning):
    """A text was truncated to the model's context."""


class TextBatch(NamedTuple):
    """Padded ids; `mask` is True on real tokens (do not infer it from the pad id: CLIP's 0 is also "!")."""

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    cut: list[int]  # tokens cut from each text


class Piece(NamedTuple):
    """A token of a text: `token` as the vocabulary writes it, the characters that it covers, without blanks at its
    ends, and those of its word, where words are what the pipeline splits before it looks up tokens. `subword`: it
    continues a word."""

    id: int
    token: str
    start: int
    end: int
    word: tuple[int, int]
    subword: bool


class Tokenizer(ABC):
    """Base class. `encode` returns plain ids only: no text becomes a control id.

    Subclasses set the ids below and implement `_encode`, `_decode` and `save`."""

    vocab_size: int
    pad_id: int
    bos_id: int | None = None
    named_bos_id: int | None = None  # bos that no text begins with by itself (GPT-2)
    eos_id: int | None = None
    end_ids: tuple[int, ...] = ()  # that end a generated text too
    puts_end: bool = False  # it puts eos after each text to embed, also for a causal model (Qwen3-Embedding)
    mask_id: int | None = None  # masked token
    mask_lstrip: bool = True  # blanks before a mask belong to it
    unknown_id: int | None = None  # token of what the vocabulary cannot spell; `decode` drops it as a control token
    language_ids: Mapping[str, int] = MappingProxyType({})  # id of each language token, for translation
    language_in_source: bool = False  # target language before the source, else before the output
    sentinel_ids: tuple[int, ...] = ()  # of masked spans, in order
    control: frozenset[int] = frozenset()  # ids that no text yields
    pair_ends: int = 1  # eos between the two texts of a pair
    pair_segment: int = 1  # of the second text of a pair (RoBERTa: 0)
    context: int | None = None  # default length of a batch
    pad_to_length: bool = False  # pad batches to `context`, else to the longest text
    cuts_left: bool = False  # a text beyond the context loses its beginning
    cleans: bool = False  # decoded texts have no blank before punctuation and contractions
    joins: bool = False  # a text is its tokens' texts one after the other
    cleanable: bool = False  # transformers 5 cleans texts of this vocabulary, if asked to: not of BPE

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Plain ids of a valid text."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of valid ids."""

    @abstractmethod
    def save(self, folder: Path | str) -> None:
        """Write the files that `tokenizer_from(folder)` reads."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without control ids. Raises TextError for a lone surrogate."""
        return self._encode(checked(text))

    def pipeline(self) -> dict[str, Any] | None:
        """Content of a `tokenizer.json` without control tokens, for other programs; None: it has no such form."""
        return None

    def pieces(self, text: str) -> list[Piece]:
        """Tokens of a text with their places in it. Raises CheckpointError for a tokenizer without places."""
        raise CheckpointError(f"{type(self).__name__}: its tokens have no places in the text, which this task needs")

    def joined(self, tokens: Sequence[str]) -> str:
        """Text of tokens as `pieces` writes them. Raises CheckpointError for a tokenizer without places."""
        raise CheckpointError(f"{type(self).__name__}: its tokens have no places in the text, which this task needs")

    @property
    def control_names(self) -> Mapping[str, int]:
        """Names of control tokens, as chat templates write them, and their ids."""
        return {}

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """Ids before and after a text: bos and eos, if the vocabulary has them."""
        return [] if self.bos_id is None else [self.bos_id], [] if self.eos_id is None else [self.eos_id]

    def length_in(self, context: int) -> int:
        """Longest row for a model of `context` positions."""
        return min(context, self.context or context)

    def encode_template(self, text: str) -> list[int]:
        """Ids of a rendered chat template: names of control tokens become their ids, and `MARK`s, which keep texts from
        forming such names, are dropped. Raises TextError for a lone surrogate."""
        names = self.control_names
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "$^"
        parts = re.split(f"({pattern})", checked(text))  # texts and names alternate
        ids = ([names[part]] if i % 2 else self.encode(part.replace(MARK, "")) for i, part in enumerate(parts) if part)
        return list(chain.from_iterable(ids))

    def decode(self, ids: Sequence[int], skip_control: bool = True) -> str:
        """Text of ids, with `skip_control` without control and unknown tokens; invalid UTF-8 becomes U+FFFD, which
        ByT5's bytes drop within a text. Raises TextError for an id outside the vocabulary."""
        text = self.spelled(ids, skip_control)
        return cleaned(text) if self.cleans else text

    def spelled(self, ids: Sequence[int], skip_control: bool = True) -> str:
        """`decode` that never cleans."""
        ids = [int(i) for i in ids]
        if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise TextError(f"token id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return self._decode([i for i in ids if not (skip_control and (i in self.control or i == self.unknown_id))])

    def kept(self, ids: list[int], room: int) -> list[int]:
        """The part of a text's ids that fits into `room`."""
        return ids[max(len(ids) - room, 0) :] if self.cuts_left else ids[:room]

    def pair(
        self,
        first: str | Sequence[int],
        second: str | Sequence[int],
        length: int | None = None,
        ends: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Ids and segments of two texts, or of their ids, in one row: bos first eos second eos, with the second text
        and last eos in segment 1 (Devlin et al. 2019, figure 2), or 0 for RoBERTa. `ends`: number of eos between them
        (default: the tokenizer's own; RoBERTa: 2).

        A row longer than `length` (default: `context`) is cut at the end of the longer text (its beginning with
        `cuts_left`), or of both to about equal length, with a TextCut warning. Raises TextError."""
        start, end = self.frame
        ends = self.pair_ends if ends is None else ends
        a, b = (self.encode(text) if isinstance(text, str) else list(text) for text in (first, second))
        length = self.context if length is None else length
        room = len(a) + len(b) if length is None else length - len(start) - (ends + 1) * len(end)
        if room < 0:
            raise TextError(f"length: {length} tokens leave no room for the control tokens")
        if (lost := len(a) + len(b) - room) > 0:
            warnings.warn(TextCut(f"a pair of texts is cut to {length} tokens, {lost} lost"), stacklevel=2)
            keep = max(room // 2, room - len(b)) if len(a) <= len(b) else max((room + 1) // 2, room - len(b))
            a = self.kept(a, min(len(a), keep))
            b = self.kept(b, room - len(a))
        before, after = start + a + end * ends, b + end
        return before + after, [0] * len(before) + [self.pair_segment] * len(after)

    def batch(
        self, texts: Iterable[str], length: int | None = None, pad_to_length: bool | None = None, warn: bool = True
    ) -> TextBatch:
        """Ids [B T] of texts between bos and eos (if the vocabulary has them), with mask and counts of cut tokens.

        `length`: maximum tokens of a row, with bos and eos (default: `context`). Rows are padded to the longest text,
        or to `length` with `pad_to_length`. Truncated rows keep their eos; one TextCut warning per batch, with
        `warn`. Raises TextError."""
        if not (texts := texts_of(texts, "texts")):
            raise TextError("texts: expected at least one")
        length = self.context if length is None else length
        pad_to_length = self.pad_to_length if pad_to_length is None else pad_to_length
        start, end = self.frame
        room = None if length is None else length - len(start) - len(end)
        if room is not None and (room < 0 or length == 0):
            raise TextError(f"length: {length} tokens leave no room for the control tokens")
        if pad_to_length and length is None:
            raise TextError("pad_to_length needs a length")
        full = [self.encode(text) for text in texts]
        rows = [start + (ids if room is None else self.kept(ids, room)) + end for ids in full]
        cut = [len(ids) - room if room is not None and len(ids) > room else 0 for ids in full]
        if warn:
            warn_of_cut(texts, cut, length)
        return TextBatch(*_padded(rows, length if pad_to_length else None, self.pad_id), cut)


def _padded(rows: list[list[int]], width: int | None, pad_id: int) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Ids and mask; `width`: default the longest row."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    mask = np.arange(lengths.max() if width is None else width) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    return torch.from_numpy(ids), torch.from_numpy(mask)


def with_names(ids: list[int], names: Mapping[int, str], spell: Callable[[list[int]], str]) -> str:
    """Text of ids: `spell` decodes runs of plain ids, others have `names`."""
    runs = groupby(ids, key=names.__contains__)
    return "".join("".join(map(names.__getitem__, run)) if named else spell(list(run)) for named, run in runs)


def warn_of_cut(texts: Sequence[str], cut: Sequence[int], length: int | None) -> None:
    """Give one TextCut warning for all texts that lost tokens, at the caller's caller."""
    first = next((i for i, lost in enumerate(cut) if lost), None)
    if first is None:
        return
    others = sum(lost > 0 for lost in cut) - 1
    more = f"; {others} more of {len(texts)} texts were cut too" if others else ""
    message = f"text {texts[first][:40]!r} is cut to {length} tokens, {cut[first]} lost{more}"
    warnings.warn(TextCut(message), stacklevel=3)


def texts_of(values: Any, name: str, error: type[MultimodalError] = TextError) -> list[str]:
    """List of texts from any iterable that has an order. Raises `error` with the argument's `name` and the value."""
    other = isinstance(values, str | bytes | Mapping | set | frozenset)
    if other or not isinstance(values, Iterable) or getattr(values, "ndim", 1) != 1:
        raise error(f"{name}: expected a list of texts ({shown(values)})")
    texts = list(values)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise error(f"{name}: number {number} of {len(texts)}: expected a text ({shown(text)})")
    return texts


def checked(text: Any) -> str:
    """Return a text that UTF-8 can encode. Raises TextError for others (lone surrogates)."""
    if not isinstance(text, str):
        raise TextError(f"expected a text ({shown(text)})")
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"text {text[:40]!r} has a lone surrogate at character {error.start}") from None
    return text


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Begin the message of a CheckpointError inside the block with `path`, unless it names a file of that folder."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path.parent)) else f"{path}: {text}") from None


def cleaned(text: str) -> str:
    """Text without blanks before punctuation and contractions."""
    for before, after in CLEANED.items():
        text = text.replace(before, after)
    return text


def write_record(folder: Path | str, record: dict[str, Any], own: Tokenizer | None = None) -> None:
    """Write the tokenizer record of a checkpoint folder. `own`: the tokenizer, if it may have flags."""
    record = record | {flag: True for flag in FLAGS if getattr(own, flag, False)}
    write_text(Path(folder) / RECORD, json.dumps(record, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def require_keys(record: dict[str, Any], types: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError unless a record has exactly these keys and types (as in `system.records`)."""
    if unknown := sorted(set(record) - set(types)):
        raise CheckpointError(f"{where / RECORD}: unknown key {unknown[0]!r}")
    for key, kind in types.items():
        if key not in record:
            raise CheckpointError(f"{where / RECORD}: key {key!r} is missing")
        checked_value(kind, record[key], f"{where / RECORD}: {key}")
