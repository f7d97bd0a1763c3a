"""T5's and ByT5's vocabularies with the sentinels that stand for masked spans (Raffel et al. 2020, section 3.1.4)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import read_json, write_whole
from multimodal.tokens.text.languages import SENTINEL, sentinels_of
from multimodal.tokens.text.sentencepiece import ByteTokenizer, SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer, write_record

FILE = "spiece.model"
SENTINELS = 100
CONTROL = b"\x18\x03"  # field 3 of a piece, its type: control, which no text yields


class T5Text(SentencePieceTokenizer):
    """A SentencePiece model and its sentinels: T5's stand above its pieces, the first highest; mT5's are pieces, which
    here no text yields."""

    def __init__(self, path: Path | str, sentinels: int, vocab_size: int):
        """`sentinels`: how many, where the file has none itself. Raises CheckpointError naming the file when they leave
        the vocabulary of `vocab_size`, or it lacks an end."""
        try:
            proto = without_sentinels(Path(path).read_bytes())
        except (OSError, LookupError):  # the library will say what is wrong
            proto = None
        super().__init__(path, vocab_size=vocab_size, proto=proto)
        if self.eos_id is None:
            raise CheckpointError(f"{self.path}: has no id for the end of a text")
        names = map(self._model.id_to_piece, range(self._held))
        self.names = {name: i for i, name in enumerate(names) if SENTINEL.fullmatch(name)}
        if not self.names:
            if sentinels > max(0, vocab_size - self._held):  # before they are made: a file can claim any number
                raise CheckpointError(
                    f"{self.path}: {sentinels} sentinels above {self._held} leave the {vocab_size} ids"
                )
            self.names = {f"<extra_id_{i}>": self._held + sentinels - 1 - i for i in range(sentinels)}
        self.sentinel_ids = sentinels_of(self.names)
        self.control |= frozenset(self.sentinel_ids)

    def _name(self, i: int) -> str:
        number = self.sentinel_ids.index(i) if i in self.sentinel_ids else None
        return super()._name(i) if number is None else f"<extra_id_{number}>"

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, self._model.serialized_model_proto())
        record = {"kind": "t5", "sentinels": len(self.sentinel_ids), "vocab_size": self.vocab_size}
        write_record(folder, record)


class ByT5Text(ByteTokenizer):
    """ByT5's bytes and after them the sentinels, as transformers numbers them. (The released models were trained with
    the bytes 255, 254, … in their place, ids 258, 257, …, which UTF-8 has not at first: Xue et al. 2022, section
    3.)"""

    def __init__(self, sentinels: int = 125):
        self.vocab_size = ByteTokenizer.vocab_size + sentinels
        self.sentinel_ids = tuple(range(ByteTokenizer.vocab_size, self.vocab_size))
        self.control = ByteTokenizer.control | frozenset(self.sentinel_ids)

    def _decode(self, ids: list[int]) -> str:
        first, text, plain = ByteTokenizer.vocab_size, [], []
        for i in ids:
            if i < first:
                plain.append(i)
            else:
                text += [super()._decode(plain), f"<extra_id_{i - first}>"]
                plain = []
        return "".join([*text, super()._decode(plain)])

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "byt5", "sentinels": len(self.sentinel_ids)})


def t5_from(folder: Path, settings: dict[str, Any]) -> T5Text:
    """Build from a record and the model beside it."""
    return T5Text(folder / FILE, **settings)


def t5_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """Of a folder in the layout of Hugging Face, for a model of this configuration; None where there is none.

    Raises CheckpointError naming the file, also for a vocabulary that does not go with the model."""
    from multimodal.tokens.text.hub.files import hub_tokenizer

    if folder is None:
        return None
    size = config["vocab_size"]
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    if record.get("tokenizer_class") == "ByT5Tokenizer":
        if size < ByteTokenizer.vocab_size:
            raise CheckpointError(f"{folder / RECORD}: bytes need {ByteTokenizer.vocab_size} ids, the model has {size}")
        return ByT5Text(size - ByteTokenizer.vocab_size)
    if (folder / FILE).is_file():
        sentinels = record.get("extra_ids", SENTINELS)
        if type(sentinels) is not int or sentinels < 0:
            raise CheckpointError(f"{folder / RECORD}: extra_ids {sentinels!r} is no number of sentinels")
        return T5Text(folder / FILE, sentinels, size)
    return hub_tokenizer(folder, config)


def without_sentinels(model: bytes) -> bytes:
    """A SentencePiece model whose sentinels are control pieces, which are not looked for in a text.

    The format is protobuf's: field 1 of the model is a piece, whose fields 1 and 3 are its name and type; of a field
    that is there twice the last holds."""
    if b"<extra_id_" not in model:
        return model
    made = b""
    for key, value in _fields(model):
        if key == b"\x0a" and re.search(rb"<extra_id_\d+>", value):
            value += CONTROL
        made += key + (_varint(len(value)) if key[0] & 7 == 2 else b"") + value
    return made


def _fields(message: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of each field, the value of a varint or a fixed number as it stands."""
    at = 0
    while at < len(message):
        start = at
        at = _after_varint(message, at)
        key, kind = message[start:at], message[start] & 7
        if kind == 2:
            end = _after_varint(message, at)
            size = sum((byte & 127) << (7 * i) for i, byte in enumerate(message[at:end]))
            at, stop = end, end + size
        else:
            stop = _after_varint(message, at) if kind == 0 else at + {1: 8, 5: 4}[kind]
        yield key, message[at:stop]
        at = stop


def _after_varint(message: bytes, at: int) -> int:
    while message[at] & 128:
        at += 1
    return at + 1


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])
