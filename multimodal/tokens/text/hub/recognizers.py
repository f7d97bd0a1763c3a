"""Tokenizers of speech recognizers: letters of wav2vec 2.0, Canary's vocabularies of several languages, and one id more
for searches that must end a text."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, TextError
from multimodal.system.files import write_whole
from multimodal.tokens.text.sentencepiece import pieces_model
from multimodal.tokens.text.tokenizer import Tokenizer, cleaned, with_names, write_record

NAMED, PART = re.compile(r"<\|.+\|>|<pad>"), re.compile(r"tokenizer-\d+\.model")


class LetterTokenizer(Tokenizer):
    """One token per character of a text, `space` for a blank. Texts have no start and end. A character that is not in
    the vocabulary is tried in the other case, then is `unknown`; without that it raises TextError. `clean`: decoded
    texts have no blank before punctuation and contractions."""

    pad_id = 0

    def __init__(self, tokens: list[str], space: str, control: list[str], unknown: str | None, clean: bool = False):
        """`tokens` in the order of their ids. Raises CheckpointError for repeated or missing ones."""
        self.tokens, self.space, self.names, self.unknown = list(tokens), space, list(control), unknown
        self.clean, self.joins = clean, not clean
        self._ids = {token: i for i, token in enumerate(tokens)}
        if not tokens or len(self._ids) < len(tokens):
            raise CheckpointError("letters: tokens must be unique and not empty")
        if missing := [name for name in (space, *control, *([unknown] if unknown else [])) if name not in self._ids]:
            raise CheckpointError(f"letters: {missing[0]!r} is not in the vocabulary")
        self.vocab_size = len(tokens)
        self.unknown_id = None if unknown is None else self._ids[unknown]
        self.control = frozenset(self._ids[name] for name in control) - {self.unknown_id}

    def _encode(self, text: str) -> list[int]:
        return [self._id(character, text) for character in text]

    def is_space(self, token: int) -> bool:
        return self.tokens[token] == self.space

    def _id(self, character: str, text: str) -> int:
        if character == " ":
            return self._ids[self.space]
        for form in (character, character.upper(), character.lower()):
            if form in self._ids and form != self.space:
                return self._ids[form]
        if self.unknown_id is None:
            raise TextError(f"text {text[:40]!r}: {character!r} is not in this vocabulary of {self.vocab_size}")
        return self.unknown_id

    def _decode(self, ids: list[int]) -> str:
        text = "".join(" " if self.tokens[i] == self.space else self.tokens[i] for i in ids)
        return cleaned(text) if self.clean else text

    def save(self, folder: Path | str) -> None:
        record = {"kind": "letters", "tokens": self.tokens, "space": self.space, "control": self.names,
                  "unknown": self.unknown}  # fmt: skip
        write_record(folder, record | ({"clean": True} if self.clean else {}))


class AggregateTokenizer(Tokenizer):
    """SentencePiece models one behind another, as NeMo's Canary has them: control tokens, then each language. Texts are
    encoded by the first that has text; ids past the last are control ids (rows that round up an embedding)."""

    pad_id = 0

    def __init__(self, parts: Sequence[bytes], vocab_size: int, where: str = "tokenizer"):
        """Raises CheckpointError for models that do not fit `vocab_size`."""
        self.parts, self.vocab_size = list(parts), vocab_size
        self._models = [pieces_model(Path(where), part) for part in parts]
        self._ends = list(accumulate(model.vocab_size() for model in self._models))
        if not self._ends or not self._ends[-1] <= vocab_size < 2 * self._ends[-1]:
            raise CheckpointError(f"{where}: has {(self._ends or [0])[-1]} tokens, the model {vocab_size}")
        self._starts = [0, *self._ends[:-1]]
        names: dict[int, str] = {}
        for start, model in zip(self._starts, self._models, strict=True):
            pieces = {start + i: model.id_to_piece(i) for i in range(model.vocab_size())}
            names |= {i: piece for i, piece in pieces.items()
                      if NAMED.fullmatch(piece) or model.is_control(i - start)}  # fmt: skip
        self._names = names | {i: f"[{i}]" for i in range(self._ends[-1], vocab_size)}
        self.control = frozenset(self._names)
        self.eos_id = self.control_names.get("<|endoftext|>")
        texts = [place for place, start in enumerate(self._starts) if self._ends[place] - start > self._named_in(place)]
        self._text = max(texts[:2], default=0)

    def _named_in(self, place: int) -> int:
        return sum(self._starts[place] <= i < self._ends[place] for i in self._names) + 1  # and its unknown

    @property
    def control_names(self) -> Mapping[str, int]:
        return {name: i for i, name in self._names.items()}

    def _encode(self, text: str) -> list[int]:
        start = self._starts[self._text]
        return [i for one in self._models[self._text].encode(text) if (i := start + one) not in self.control]

    def _decode(self, ids: list[int]) -> str:
        return with_names(ids, self._names, self._spelled)

    def _spelled(self, ids: list[int]) -> str:
        runs = groupby(ids, key=lambda i: bisect_right(self._ends, i))
        return " ".join(self._models[place].decode([i - self._starts[place] for i in run]) for place, run in runs)

    def save(self, folder: Path | str) -> None:
        names = [f"tokenizer-{number}.model" for number in range(len(self.parts))]
        for name, part in zip(names, self.parts, strict=True):
            write_whole(Path(folder) / name, part)
        write_record(folder, {"kind": "aggregate", "files": names, "vocab_size": self.vocab_size})


def aggregate_from(folder: Path, settings: dict[str, Any]) -> AggregateTokenizer:
    """Build from a record; the files must lie in the folder itself. Raises CheckpointError."""
    try:
        parts = [(folder / name).read_bytes() for name in settings["files"] if PART.fullmatch(name)]
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.filename}: {error.strerror}") from None
    return AggregateTokenizer(parts, settings["vocab_size"], str(folder))


class WithEnd(Tokenizer):
    """`own` and a control token after its last id, which begins and ends texts. A first token keeps its leading space,
    which some decoders drop, so that tokens that begin a word show. It is saved as `own`."""

    def __init__(self, own: Tokenizer):
        self.own, self.vocab_size, self.pad_id = own, own.vocab_size + 1, own.pad_id
        self.bos_id = self.eos_id = own.vocab_size
        self.control, self.unknown_id = own.control | {self.eos_id}, own.unknown_id
        plain = (i for i in range(own.vocab_size) if i not in own.control and own.decode([i]).isascii())
        self.anchor = next((i for i in plain if own.decode([i]).strip()), None)

    def _encode(self, text: str) -> list[int]:
        return self.own.encode(text)

    def _decode(self, ids: list[int]) -> str:
        ids = [i for i in ids if i != self.eos_id]
        if self.anchor is not None:
            before = self.own.decode([self.anchor], skip_control=False)
            whole = self.own.decode([self.anchor, *ids], skip_control=False)
            if whole.startswith(before):
                return whole[len(before) :]
        return self.own.decode(ids, skip_control=False)

    def save(self, folder: Path | str) -> None:
        self.own.save(folder)
