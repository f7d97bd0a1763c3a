"""Texts to pretrain on: running text in documents of sentences and lines that stand alone, as windows of tokens."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multimodal.data.manifests import read_text
from multimodal.errors import DataError
from multimodal.tokens.text.tokenizer import Tokenizer

UNKNOWN = "<unk>"  # as WikiText writes words that it left out
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_MARKS = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."}  # WikiText's, inside of a word or a number

Sentence = list[int]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, gzip or not, stripped. Raises DataError where it cannot be read or holds no text."""
    text = read_text(path)
    if not text.strip():
        raise DataError(f"{path}: holds no text ({len(text)} characters)")
    return [line.strip() for line in text.split("\n")]


def read_documents(path: Path) -> list[list[str]]:
    """The sentences of each document of a file with running text: documents end at empty lines, sentences at a full
    stop, question or exclamation mark before a capital. The marks of WikiText inside of words are taken back."""
    found: list[list[str]] = [[]]
    for line in read_lines(path):
        for mark, plain in _MARKS.items():
            line = line.replace(mark, plain)
        if line:
            found[-1] += _SENTENCE.split(line)
        elif found[-1]:
            found.append([])
    return [document for document in found if document]


def read_texts(path: Path) -> list[list[str]]:
    """Each line as a document of its own; of a `.tsv` its first column."""
    table = ".tsv" in path.suffixes
    texts = (line.split("\t")[0].strip() if table else line for line in read_lines(path))
    return [[text] for text in texts if text]


def plain_texts(documents: Iterable[Sequence[str]]) -> Iterable[str]:
    """All sentences without the mark for words that were left out, for a tokenizer's training."""
    return (sentence.replace(UNKNOWN, " ") for document in documents for sentence in document)


def encoded(sentence: str, tokenizer: Tokenizer) -> Sentence:
    """Ids of a sentence. Words that WikiText left out are the tokenizer's unknown id where it has one."""
    unknown = getattr(tokenizer, "unknown_id", None)
    if unknown is None or UNKNOWN not in sentence:
        return tokenizer.encode(sentence)
    ids: list[int] = []
    for part in sentence.split(UNKNOWN):
        ids += [*tokenizer.encode(part), unknown]
    return ids[:-1]


@dataclass(frozen=True)
class Window:
    """Sentences in a row, of one document. `document` is its number."""

    document: int
    sentences: tuple[Sentence, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.sentences))

    @property
    def ids(self) -> list[int]:
        return [i for sentence in self.sentences for i in sentence]


def windows(documents: Sequence[Sequence[str]], tokenizer: Tokenizer, room: int, shortest: int = 4) -> list[Window]:
    """Every document in windows of at most `room` tokens that hold whole sentences (RoBERTa's DOC-SENTENCES, Liu et al.
    2019, section 4.2); a longer sentence goes on in the next window. What is under `shortest` tokens, such as a
    heading, is left out."""
    found: list[Window] = []
    for number, document in enumerate(documents):
        held: list[Sentence] = []
        for sentence in (encoded(text, tokenizer) for text in document):
            while sentence:
                left = room - sum(map(len, held))
                if held and len(sentence) > left:
                    found.append(Window(number, tuple(held)))
                    held, left = [], room
                held.append(sentence[:left])
                sentence = sentence[left:]
        found.append(Window(number, tuple(held)))
    return [window for window in found if window.size >= shortest]
