"""Pretraining texts: documents of sentences, or single lines, as windows of tokens."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multimodal.data.datasets.text import texts_in
from multimodal.data.manifests import ending, is_manifest, read_text, tsv_cells
from multimodal.errors import DataError, UsageError
from multimodal.tokens.text.tokenizer import Tokenizer

UNKNOWN = "<unk>"  # WikiText's mark for rare words
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_MARKS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}  # WikiText's marks inside words and numbers

Sentence = list[int]


def read_lines(path: Path) -> list[str]:
    """Read the stripped lines of a plain, gzip or Zstandard file. Raises DataError for an unreadable or empty one."""
    return [line.strip() for line in _lines(path)]


def read_rows(path: Path) -> list[tuple[int, list[str]]]:
    """Read the filled lines of a TSV, with their numbers, as cells, any of which may be empty; first and last columns
    without any text are left out. Raises DataError."""
    rows = [(number, tsv_cells(line.strip(" "))) for number, line in enumerate(_lines(path), 1) if line.strip()]
    for end in (0, -1):
        while not any(cells[end].strip() for _, cells in rows):
            for _, cells in rows:
                del cells[end]
    return rows


def _lines(path: Path) -> list[str]:
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: holds no text ({len(text)} characters)")
    return text.split("\n")


def read_documents(path: Path) -> list[list[str]]:
    """Read documents as lists of sentences. Documents are the texts of a manifest, else end at empty lines; sentences
    end at a full stop, question or exclamation mark before a capital. WikiText's marks inside words are undone."""
    found: list[list[str]] = [[]]
    for line in _text_lines(path) if is_manifest(path) else read_lines(path):
        for mark, plain in _MARKS.items():
            line = line.replace(mark, plain)
        if line:
            found[-1] += _SENTENCE.split(line)
        elif found[-1]:
            found.append([])
    return [document for document in found if document]


def _text_lines(path: Path) -> list[str]:
    """The filled lines of a manifest's texts, an empty line after each text."""
    return [line for text in texts_in(path) for line in [*filter(None, map(str.strip, text.split("\n"))), ""]]


def read_texts(path: Path) -> list[list[str]]:
    """Read each line as a document; of a `.tsv` its first column, of another manifest its texts."""
    if ending(path) == ".tsv":
        texts = [cells[0] for _, cells in read_rows(path)]
    else:
        texts = texts_in(path) if is_manifest(path) else read_lines(path)
    return [[text.strip()] for text in texts if text.strip()]


def documents_in(paths: Iterable[Path], lines: Iterable[Path] = ()) -> list[list[str]]:
    """Read the documents of `paths`, and each line of `lines` as a document."""
    return [document for path in paths for document in read_documents(path)] + [
        document for path in lines for document in read_texts(path)
    ]


def plain_texts(documents: Iterable[Sequence[str]]) -> Iterable[str]:
    """Yield all sentences without WikiText's mark for rare words, to train a tokenizer."""
    return (sentence.replace(UNKNOWN, " ") for document in documents for sentence in document)


def encoded(sentence: str, tokenizer: Tokenizer) -> Sentence:
    """Encode a sentence; WikiText's rare words become the tokenizer's unknown id, if it has one."""
    unknown = tokenizer.unknown_id
    if unknown is None or UNKNOWN not in sentence:
        return tokenizer.encode(sentence)
    ids: list[int] = []
    for part in sentence.split(UNKNOWN):
        ids += [*tokenizer.encode(part), unknown]
    return ids[:-1]


@dataclass(frozen=True)
class SentenceWindow:
    """Consecutive sentences of document number `document`."""

    document: int
    sentences: tuple[Sentence, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.sentences))

    @property
    def ids(self) -> list[int]:
        return [i for sentence in self.sentences for i in sentence]


def _between(documents: Sequence[Sequence[str]], tokenizer: Tokenizer) -> str:
    """A space for tokenizers that see it before a sentence's first word, else nothing."""
    for document in documents:
        if len(document) > 1:
            last, first = document[0].split()[-1], document[1].split()[0]
            alone = [*tokenizer.encode(last), *tokenizer.encode(first)]
            return "" if tokenizer.encode(f"{last} {first}") == alone else " "
    return ""


def windows(
    documents: Sequence[Sequence[str]], tokenizer: Tokenizer, room: int, shortest: int = 4
) -> list[SentenceWindow]:
    """Split documents into windows of whole sentences, at most `room` tokens (RoBERTa's DOC-SENTENCES, Liu et al. 2019,
    section 4.2); a longer sentence continues in the next window. Windows under `shortest` tokens, such as headings, are
    dropped. Sentences are encoded as parts of one text. Raises UsageError for less room than that."""
    if room < shortest:
        raise UsageError(f"must be larger by {shortest - room} or more, for texts of {shortest} tokens", "context")
    found: list[SentenceWindow] = []
    between = _between(documents, tokenizer)
    for number, document in enumerate(documents):
        held: list[Sentence] = []
        for sentence in (encoded(between * (at > 0) + text, tokenizer) for at, text in enumerate(document)):
            while sentence:
                left = room - sum(map(len, held))
                if held and len(sentence) > left:
                    found.append(SentenceWindow(number, tuple(held)))
                    held, left = [], room
                held.append(sentence[:left])
                sentence = sentence[left:]
        found.append(SentenceWindow(number, tuple(held)))
    return [window for window in found if window.size >= shortest]
