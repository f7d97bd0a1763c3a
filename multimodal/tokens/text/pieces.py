"""Tokens of a text with their places in it, and overlapping windows of a long one, alone or with a question before."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from multimodal.errors import TextError
from multimodal.tokens.text.tokenizer import Piece, Tokenizer

if TYPE_CHECKING:
    import tokenizers


class PairRow(NamedTuple):
    """Ids and segments of two texts in one row."""

    ids: list[int]
    segments: list[int]


class ContextWindow(NamedTuple):
    """A question with a part of its context, whose tokens `pieces` begin at `first` of the row."""

    row: PairRow
    first: int
    pieces: list[Piece]


def pieces_of(backend: "tokenizers.Tokenizer", text: str, unknown_id: int | None) -> list[Piece]:
    """Tokens of a text. A token continues a word as in transformers' token classification: by the vocabulary's prefix
    of continuations ("##"), else by the lack of a blank before it."""
    marked, pieces = bool(getattr(backend.model, "continuing_subword_prefix", None)), []
    found = backend.encode(text, add_special_tokens=False)
    for number, (i, token, place) in enumerate(zip(found.ids, found.tokens, found.offsets, strict=True)):
        start, end = _trimmed(text, *place)
        if token == "Ġ" != text[start:end]:  # a blank, also one put before the first word
            end = start
        subword = len(token) != end - start if marked else start > 0 and " " not in text[start - 1 : start + 1]
        word = found.token_to_word(number)
        whole = _trimmed(text, *found.word_to_chars(word)) if word is not None else (start, end)
        pieces.append(Piece(i, token, start, end, whole, subword and i != unknown_id))
    return pieces


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The place without blanks at its ends."""
    part = text[start:end]
    start = min(start + len(part) - len(part.lstrip()), end)
    return start, max(end - len(part) + len(part.rstrip()), start)


def overlapping(count: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """First and last (exclusive) token of windows of at most `room` tokens. Neighbours share `overlap`, at most `room`
    - 1 (truncation with a stride in the `tokenizers` library). One window, though empty, if all fit."""
    step, first = max(1, room - overlap), 0
    windows = [(0, min(room, count))]
    while windows[-1][1] < count:
        first += step
        windows.append((first, min(first + room, count)))
    return windows


def context_windows(
    question: str, context: str, tokenizer: Tokenizer, max_tokens: int, overlap: int
) -> list[ContextWindow]:
    """Rows of at most `max_tokens` with the question and overlapping parts of the context. Raises TextError if an empty
    question or context, or a question that leaves no room."""
    for name, text in (("question", question), ("context", context)):
        if not text.strip():
            raise TextError(f"{name}: is empty")
    asked, pieces = tokenizer.encode(question), tokenizer.pieces(context)
    room = max_tokens - len(tokenizer.pair(asked, [], len(asked) + max_tokens)[0])
    if room < 1:
        raise TextError(f"question {question[:40]!r}: has {len(asked)} tokens, which leave no room in {max_tokens}")
    windows = []
    for start, end in overlapping(len(pieces), room, min(overlap, max_tokens // 2, room - 1)):
        own = pieces[start:end]
        row = PairRow(*tokenizer.pair(asked, [piece.id for piece in own], max_tokens))
        windows.append(ContextWindow(row, len(row.ids) - len(own) - (tokenizer.eos_id is not None), own))
    return windows


def choice_rows(question: str, choices: Sequence[str], tokenizer: Tokenizer, context: int) -> list[PairRow]:
    """The question with each choice. Raises TextError for a pair that is longer than the context."""
    asked = tokenizer.encode(question)
    return [pair_row(asked, choice, tokenizer, context, f"choice {choice[:40]!r}") for choice in choices]


def pair_row(asked: list[int], text: str, tokenizer: Tokenizer, context: int, name: str) -> PairRow:
    """An encoded question with a text, called `name` in errors. Raises TextError for a pair longer than the context."""
    try:
        ids = tokenizer.encode(text)
    except TextError as error:
        raise TextError(f"{name}: {error}") from None
    row = PairRow(*tokenizer.pair(asked, ids, len(asked) + len(ids) + 4))
    if len(row.ids) > context:
        raise TextError(f"{name}: has {len(row.ids)} tokens with its question, beyond the context of {context}")
    return row
