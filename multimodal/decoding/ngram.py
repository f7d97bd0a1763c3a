"""Word n-gram language models from ARPA files, and scores of sub-word tokens by them (`lm_fusion.ShallowFusion`)."""

import codecs
import gzip
import math
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.system.files import path_of
from multimodal.tokens.text.tokenizer import Tokenizer

START, END, UNKNOWN, CAPITALS = "<s>", "</s>", "<unk>", "<UNK>"  # some files have the last
MISSING = -100.0  # log10 p(<unk>) of a file without one, as in KenLM
MOST_STATES = 1 << 14  # texts
LOWEST = -1000.0  # for SRILM's -inf, so that differences stay finite
MOST_LINE = 1 << 16  # bytes
CACHED = 1 << 24  # cached probabilities of recent contexts
LEAST_SPELLED = 0.1  # share of a file's words that tokens must be able to spell
Ids = tuple[int, ...]


class Table(NamedTuple):
    """The n-grams of one order, sorted by `keys`: (row of the first n - 1 words in the lower table)·W + last word, with
    natural logs of probability and back-off weight."""

    keys: np.ndarray  # int64
    logprobs: np.ndarray  # float32
    backoffs: np.ndarray  # float32


class NgramModel:
    """Back-off model (Katz 1987) over the sorted `words`, 16 bytes per n-gram. Unknown words are `<unk>`."""

    def __init__(self, words: list[str], tables: list[Table]):
        self.words, self.tables, self.order = words, tables, len(tables)
        self.ids = {word: i for i, word in enumerate(words)}
        self.start, self.end, self.unknown = (self.ids[word] for word in (START, END, UNKNOWN))
        self._vector = lru_cache(max(64, CACHED // len(words)))(self._vector)

    def word_id(self, word: str) -> int:
        """`<s>` and `</s>` in a text are unknown words."""
        return self.unknown if word in (START, END) else self.ids.get(word, self.unknown)

    def context(self, history: Ids, word: int) -> Ids:
        """The context of the next word after `history` and `word`."""
        return self._known((*history, word))

    def _known(self, words: Ids) -> Ids:
        """The last `order` - 1 of some words: all that the next one depends on."""
        return words[1 - self.order :] if self.order > 1 else ()

    def logprobs(self, history: Ids) -> np.ndarray:
        """Natural log p(word | history) of every word, [W] float32, read-only."""
        return self._vector(self._known(history))

    def logprob(self, text: str) -> float:
        """Natural log-probability of the words of a text and its end."""
        history, total = self.context((), self.start), 0.0
        for word in (*map(self.word_id, text.split()), self.end):
            total += float(self.logprobs(history)[word])
            history = self.context(history, word)
        return total

    def _vector(self, history: Ids) -> np.ndarray:
        if not history:
            return self.tables[0].logprobs
        lower = self._vector(history[1:])
        node = history[0]
        for table, word in zip(self.tables[1:], history[1:], strict=False):
            key = node * len(self.words) + word
            node = int(np.searchsorted(table.keys, key))
            if node == len(table.keys) or table.keys[node] != key:
                return lower  # an unseen context has back-off weight 1
        values = lower + self.tables[len(history) - 1].backoffs[node]
        table, first = self.tables[len(history)], node * len(self.words)
        low, high = np.searchsorted(table.keys, (first, first + len(self.words)))
        values[table.keys[low:high] - first] = table.logprobs[low:high]
        return values


def read_arpa(path: str | Path) -> NgramModel:
    """Read an ARPA file of any order, plain or gzip, as KenLM and SRILM write it. Raises CheckpointError with the line
    of a mismatched count, an unknown context or word, or a positive logarithm."""
    path = path_of(path, CheckpointError, "lm")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file (folder, device, pipe or socket)")
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            return _read(_Lines(path, iter(lambda: file.readline(MOST_LINE), b"")))
    except (OSError, EOFError, zlib.error) as error:
        raise CheckpointError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


class _Lines:
    """The lines of a file, stripped and counted."""

    def __init__(self, path: Path, file: Iterator[bytes]):
        self.path, self.file, self.number = path, file, 0

    def __next__(self) -> bytes:
        self.number += 1
        line = next(self.file, None)
        if line is None:
            raise self.fault("the file ends before \\end\\")
        if len(line) == MOST_LINE:
            raise self.fault(f"longer than {MOST_LINE} bytes")
        return line.strip(b" \t\r\n")

    def filled(self) -> bytes:
        while not (line := next(self)):
            pass
        return line

    def fault(self, what: str, number: int | None = None) -> CheckpointError:
        return CheckpointError(f"{self.path}: line {number or self.number}: {what}")


def _read(lines: _Lines) -> NgramModel:
    counts = _counts(lines)
    ids: dict[bytes, int] = {}
    tables: list[Table] = []
    words: list[str] = []
    for order, count in enumerate(counts, 1):
        first = lines.number + 1
        rows, logprobs, backoffs = _section(lines, order, count, ids)
        if order == 1:
            words, ids, table = _unigrams(lines, ids, logprobs, backoffs)
        else:
            keys = _keys(lines, rows, tables, len(words), first)
            places = np.argsort(keys, kind="stable")
            keys = keys[places]
            if (same := np.flatnonzero(keys[1:] == keys[:-1])).size:
                raise lines.fault("this n-gram was given before", first + int(places[same[0] + 1]))
            table = Table(keys, logprobs[places], backoffs[places])
        tables.append(table)
        expected = b"\\end\\" if order == len(counts) else b"\\%d-grams:" % (order + 1)
        if (line := lines.filled()) != expected:
            raise lines.fault(f"expected {expected.decode()} after {count} {order}-grams ({_shown(line)})")
    return NgramModel(words, tables)


def _counts(lines: _Lines) -> list[int]:
    while next(lines).removeprefix(codecs.BOM_UTF8) != b"\\data\\":  # SRILM and KenLM allow text before
        pass
    counts: list[int] = []
    while (line := lines.filled()) != b"\\1-grams:":
        name, _, count = line.partition(b"=")
        if name.split() != [b"ngram", b"%d" % (len(counts) + 1)] or not count.strip().isdigit():
            raise lines.fault(f"expected 'ngram {len(counts) + 1}=COUNT' or \\1-grams: ({_shown(line)})")
        counts.append(int(count))
    if not counts or not counts[0]:
        raise lines.fault("\\data\\ names no 1-grams")
    return counts


def _section(lines: _Lines, order: int, count: int, ids: dict[bytes, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Word ids [count, order], log-probabilities and back-offs of the next `count` lines; 1-grams go into `ids`."""
    rows, logprobs, backoffs = array("i"), array("d"), array("d")
    for done in range(count):
        line = next(lines)
        fields = line.split()
        if not order < len(fields) <= order + 2:
            known = f"{done} of the {count} {order}-grams of \\data\\ before this line ({_shown(line)})"
            raise lines.fault(known if not line or line.startswith(b"\\") else f"no {order}-gram ({_shown(line)})")
        try:
            logprob, backoff = float(fields[0]), float(fields[order + 1]) if len(fields) > order + 1 else 0.0
            if order == 1 and ids.setdefault(fields[1], done) != done:
                raise lines.fault(f"the word {_shown(fields[1])} was given before")
            rows.extend([ids[word] for word in fields[1 : order + 1]])
        except ValueError:
            raise lines.fault(f"no number ({_shown(line)})") from None
        except KeyError as error:
            raise lines.fault(f"the word {_shown(error.args[0])} is no 1-gram") from None
        if not logprob <= 0 or not backoff < math.inf:
            raise lines.fault(f"no logarithm of a probability ({_shown(line)})")
        logprobs.append(max(logprob, LOWEST))
        backoffs.append(max(backoff, LOWEST))
    return np.array(rows, np.int64).reshape(count, order), *(
        np.array(part) * math.log(10) for part in (logprobs, backoffs)
    )


def _unigrams(
    lines: _Lines, ids: dict[bytes, int], logprobs: np.ndarray, backoffs: np.ndarray
) -> tuple[list[str], dict[bytes, int], Table]:
    """Sort the words, so that those with a common prefix are adjacent."""
    try:
        given = {word.decode(): number for word, number in ids.items()}
    except UnicodeDecodeError as error:
        raise lines.fault(f"a word above is not UTF-8 ({error.object!r:.60})") from None
    if lack := [word for word in (START, END) if word not in given]:
        raise lines.fault(f"the 1-grams have no {lack[0]}")
    if CAPITALS in given:
        given.setdefault(UNKNOWN, given.pop(CAPITALS))
    if UNKNOWN not in given:
        given[UNKNOWN] = len(given)
        logprobs, backoffs = np.append(logprobs, MISSING * math.log(10)), np.append(backoffs, 0)
    words = sorted(given)
    places = [given[word] for word in words]
    values = (part[places].astype(np.float32) for part in (logprobs, backoffs))
    made = {word.encode(): i for i, word in enumerate(words)}
    made[CAPITALS.encode()] = made[UNKNOWN.encode()]
    return words, made, Table(np.arange(len(words)), *values)


def _keys(lines: _Lines, rows: np.ndarray, tables: list[Table], words: int, first: int) -> np.ndarray:
    node = rows[:, 0]
    for table, word in zip(tables[1:], rows.T[1:-1], strict=True):
        keys = node * words + word
        node = np.searchsorted(table.keys, keys)
        known = np.append(table.keys, -1)[node] == keys
        if not known.all():
            raise lines.fault("the context of this n-gram was not given", first + int(known.argmin()))
    return node * words + rows[:, -1]


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="backslashreplace")[:60])


class _State(NamedTuple):
    """State of a text: the words before the last, the tokens of the last, and the log-probability credited to these."""

    history: Ids
    partial: Ids = ()
    credited: float = 0.0


class WordScorer:
    """A `LanguageModel` over words for sub-word tokens; a token that starts with a space begins a word.

    A word's log-probability is credited token by token: an unfinished word has that of the most probable word with its
    prefix (or `<unk>`), which can only fall, so that no hypothesis leads by a cost still to come. A complete text has
    exactly its n-gram log-probability. The end is `eos_id`; other control tokens cost nothing. Texts are scored in the
    letter case in which they can spell most words. Raises CheckpointError for tokens that span words, or that spell
    hardly any word."""

    def __init__(self, model: NgramModel, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer
        texts = [tokenizer.decode([i], skip_control=False) for i in range(tokenizer.vocab_size)]
        plain = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.control]
        letters = {c for i in plain if i != tokenizer.unknown_id for c in texts[i]}
        if wrong := [texts[i] for i in plain if " " in texts[i][1:] and texts[i].strip(" ")]:
            raise CheckpointError(f"an n-gram model of words: the recognizer's token {wrong[0]!r} has a space inside")
        self.cased = _case(model.words, letters)
        texts = [self.cased(text) for text in texts]
        self.begins = {i: texts[i].strip(" ") for i in plain if texts[i].startswith(" ")}
        self.goes_on = {i: texts[i] for i in plain if i not in self.begins}
        if not self.begins:
            raise CheckpointError("an n-gram model of words: none of the recognizer's tokens begins with a space")
        self.states: dict[Ids, _State] = {}
        self._ranges, self._follow = lru_cache(1 << 14)(self._ranges), lru_cache(256)(self._follow)
        self._ahead = lru_cache(64)(self._ahead)

    def __call__(self, ids: Int[Tensor, "R N"]) -> Float[Tensor, "R V"]:
        texts = [tuple(text) for text in ids.tolist()]
        rows = np.stack([self._follow(self._remembered(text))[0] for text in texts])
        return torch.from_numpy(rows).to(ids.device)

    def _remembered(self, text: Ids) -> _State:
        """State of a text, kept for those that continue it in later calls."""
        self.states[text] = state = self._state(text)
        if len(self.states) > MOST_STATES:
            del self.states[next(iter(self.states))]
        return state

    def _state(self, text: Ids) -> _State:
        known = next((n for n in (len(text), len(text) - 1) if n > 0 and text[:n] in self.states), 0)
        state = self.states[text[:known]] if known else _State(self.model.context((), self.model.start))
        for token in text[known:]:
            state = self._after(state, token)
        return state

    def _after(self, state: _State, token: int) -> _State:
        scores, whole, history = self._follow(state)
        if token in self.begins:
            partial = (token,) if self.begins[token] else ()
            return _State(history, partial, float(scores[token]) - whole)
        if token in self.goes_on:
            return _State(state.history, (*state.partial, token), state.credited + float(scores[token]))
        return state

    def _follow(self, state: _State) -> tuple[np.ndarray, float, Ids]:
        """Score of each next token; score of completing the last word, and the word history after it."""
        scores = np.zeros(self.tokenizer.vocab_size, np.float32)
        text, whole, history = self.cased(self.tokenizer.decode(state.partial)).strip(" "), 0.0, state.history
        if state.partial:
            word = self.model.word_id(text)
            whole = float(self.model.logprobs(history)[word]) - state.credited
            history = self.model.context(history, word)
        self._look(scores, "", True, history)
        scores[list(self.begins)] += whole
        if text[-1:] != "\ufffd" or "\ufffd" in text[:-1]:  # else inside a character
            self._look(scores, text, False, state.history)
            scores[list(self.goes_on)] -= state.credited
        if self.tokenizer.eos_id is not None:
            scores[self.tokenizer.eos_id] = whole + float(self.model.logprobs(history)[self.model.end])
        return scores, whole, history

    def _look(self, scores: np.ndarray, text: str, begin: bool, history: Ids) -> None:
        """Write the log-probability of the most probable word after `history` that begins with text and token."""
        logprobs, unknown = self._ahead(history)
        others, tokens, bounds = self._ranges(text, begin)
        scores[others] = unknown
        if len(tokens):
            scores[tokens] = np.maximum(np.maximum.reduceat(logprobs, bounds)[::2], unknown)

    def _ahead(self, history: Ids) -> tuple[np.ndarray, float]:
        """Log-probabilities with -inf for control words, and one more -inf where the last range may end."""
        values = np.append(self.model.logprobs(history), np.float32(-np.inf))
        unknown = float(values[self.model.unknown])
        values[[self.model.start, self.model.end, self.model.unknown]] = -np.inf
        return values, unknown

    def _ranges(self, text: str, begin: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens that with `text` are a prefix of no word; those that are, and [start, end) of their words in turn.
        Tokens of spaces alone or of part of a character are in neither."""
        low, high = self._span(text, 0, len(self.model.words))
        others, tokens, bounds = [], [], []
        for token, piece in (self.begins if begin else self.goes_on).items():
            prefix = text + piece.partition("\ufffd")[0]
            if not prefix:
                continue
            first, last = self._span(prefix, low, high)
            if first == last:
                others.append(token)
            else:
                tokens.append(token)
                bounds += [first, last]
        return tuple(np.array(part, np.int64) for part in (others, tokens, bounds))

    def _span(self, prefix: str, low: int, high: int) -> tuple[int, int]:
        first = bisect_left(self.model.words, prefix, low, high)
        return first, bisect_right(self.model.words, prefix, first, high, key=lambda word: word[: len(prefix)])


def _case(words: list[str], letters: set[str]) -> Callable[[str], str]:
    """The letter case, by default its own, in which a text of `letters` can spell most words. Raises
    CheckpointError."""
    if "\ufffd" in letters:  # bytes spell every word
        return str
    words = [word for word in words if word not in (START, END, UNKNOWN)]
    # letter by letter: the case of a sigma must not depend on what follows
    cases = str, *(lambda text, case=case: "".join(map(case, text)) for case in (str.lower, str.upper))
    counts = [sum(own.issuperset(word) for word in words) for own in (set(case("".join(letters))) for case in cases)]
    if (most := max(counts)) < LEAST_SPELLED * len(words):
        raise CheckpointError(f"an n-gram model of words: the recognizer's tokens spell {most} of its {len(words)}")
    return cases[counts.index(most)]
