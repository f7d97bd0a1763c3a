"""A tokenizer with one id per letter."""

from multimodal.tokens.text.tokenizer import Tokenizer


class Letters(Tokenizer):
    """A letter is an id; 21 begins and 22 ends a text, as tiny.CLIPS have it."""

    vocab_size, pad_id, bos_id, eos_id, context = 23, 0, 21, 22, 12
    control = frozenset({21, 22})

    def _encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % 20 for letter in text]

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def save(self, folder: object) -> None:
        raise NotImplementedError
