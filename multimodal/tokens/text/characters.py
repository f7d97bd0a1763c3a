"""Character vocabularies."""

from collections.abc import Iterable
from pathlib import Path

from multimodal.errors import CheckpointError, TextError
from multimodal.tokens.text.tokenizer import Tokenizer, checked, write_record


class CharacterTokenizer(Tokenizer):
    """`<end>` 0, which begins and ends texts, then one token per character. Unknown characters raise TextError."""

    pad_id = bos_id = eos_id = 0
    control = frozenset({0})

    def __init__(self, characters: str):
        """Raises CheckpointError for repeated or no characters."""
        if not characters or len(set(characters)) < len(characters):
            raise CheckpointError(f"characters: must be unique and not empty (got {characters!r:.40})")
        self.characters, self.vocab_size = characters, len(characters) + 1
        self._ids = {character: number for number, character in enumerate(characters, 1)}

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """Collect the characters of the texts, in code point order. Raises TextError if there are none."""
        characters = set().union(*(checked(text) for text in texts))
        if not characters:
            raise TextError("no text to train a vocabulary on")
        return cls("".join(sorted(characters)))

    def _encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            at = text.index(error.args[0])
            raise TextError(
                f"text {text[max(0, at - 20) : at + 20]!r}: {error.args[0]!r} is not in this vocabulary of "
                f"{len(self._ids)} characters"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return "".join("<end>" if i == 0 else self.characters[i - 1] for i in ids)

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "characters", "characters": self.characters})
