"""Characters as tokens: the vocabulary is the set of characters that some text has."""

from collections.abc import Iterable
from pathlib import Path

from multimodal.errors import CheckpointError, TextError
from multimodal.tokens.text.tokenizer import Tokenizer, checked, write_record


class CharacterTokenizer(Tokenizer):
    """`<end>` 0, which begins and ends texts, then a token for each character. Text with others is refused."""

    pad_id = bos_id = eos_id = 0
    control = frozenset({0})

    def __init__(self, characters: str):
        """Raises CheckpointError where one is there twice, or there are none."""
        if not characters or len(set(characters)) < len(characters):
            raise CheckpointError(f"characters {characters!r:.40}: must be one or more different ones")
        self.characters, self.vocab_size = characters, len(characters) + 1
        self._ids = {character: number for number, character in enumerate(characters, 1)}

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharacterTokenizer":
        """The characters of the texts, in order of their code points. Raises TextError where there are none."""
        found = set().union(*(checked(text) for text in texts))
        if not found:
            raise TextError("no text to take the characters of")
        return cls("".join(sorted(found)))

    def _encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            at = text.index(error.args[0])
            raise TextError(
                f"text {text[max(0, at - 20) : at + 20]!r} has {error.args[0]!r}, none of the {len(self._ids)} "
                "characters of this vocabulary"
            ) from None

    def _decode(self, ids: list[int]) -> str:
        return "".join("<end>" if i == 0 else self.characters[i - 1] for i in ids)

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "characters", "characters": self.characters})
