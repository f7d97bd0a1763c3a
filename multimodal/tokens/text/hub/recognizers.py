"""Tokenizers of speech recognisers: letters of wav2vec 2.0, and one id more for searches that must end a text."""

from pathlib import Path

from multimodal.errors import CheckpointError, TextError
from multimodal.tokens.text.tokenizer import Tokenizer, write_record


class LetterTokenizer(Tokenizer):
    """One token per character of a text, `space` for a blank. Texts have no start and end. A character that is not in
    the vocabulary is tried in the other case, then is `unknown`; without that it raises TextError."""

    pad_id = 0

    def __init__(self, tokens: list[str], space: str, control: list[str], unknown: str | None):
        """`tokens` in the order of their ids. Raises CheckpointError for repeated or missing ones."""
        self.tokens, self.space, self.names, self.unknown = list(tokens), space, list(control), unknown
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
        return "".join(" " if self.tokens[i] == self.space else self.tokens[i] for i in ids)

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "letters", "tokens": self.tokens, "space": self.space, "control": self.names,
                              "unknown": self.unknown})  # fmt: skip


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
