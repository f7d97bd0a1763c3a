"""A list of [piece, score] in a JSON file, as karpathy's llama2.c and tinyllamas keep Llama-style vocabularies."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.tokens.files import read_json_value, shown
from multimodal.tokens.vocabularies import SentencePieceTokenizer

NAMES = ("<unk>", "<s>", "</s>")  # ids 0, 1 and 2, whatever the list calls them
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # sentencepiece_model.proto, SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def scored_tokenizer(path: Path, size: int, context: int | None = None) -> SentencePieceTokenizer:
    """Byte-pair encoding that merges the neighbours with the best score, from the characters on; what the list has no
    character for is written as its bytes. Texts get a bos, and a space before them (llama2.c, `encode`).

    The list becomes a SentencePiece model, whose library does the work. `size`: ids of the model. Raises
    CheckpointError naming the file."""
    pieces = read_json_value(path)
    if not isinstance(pieces, list) or not all(map(_is_scored, pieces)):
        raise CheckpointError(f"{path}: holds no list of pieces and scores ({shown(pieces)})")
    if missing := set(BYTES) - {piece for piece, _ in pieces[3:]}:
        raise CheckpointError(f"{path}: lacks {len(missing)} of the 256 bytes, first {min(missing)}")
    proto = b"".join(_model(pieces))
    return SentencePieceTokenizer(path, pad_id=2, add_bos=True, context=context, vocab_size=size, proto=proto)


def is_scored(path: Path) -> bool:
    """Whether a JSON file holds a list."""
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


def _is_scored(pair: Any) -> bool:
    ok = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and pair[0] != ""
    return ok and type(pair[1]) in (int, float) and math.isfinite(pair[1])


def _model(pieces: list[Any]) -> Iterator[bytes]:
    """The fields of a ModelProto."""
    for i, (piece, score) in enumerate(pieces):
        kind = (UNKNOWN, CONTROL, CONTROL)[i] if i < 3 else BYTE if piece in BYTES else NORMAL
        name = NAMES[i] if i < 3 else piece.replace(" ", "\u2581")
        yield _field(1, _field(1, name.encode()) + _field(2, float(score)) + _field(3, kind))
    yield _field(2, _field(3, BPE) + _field(4, len(pieces)) + _field(35, 1))  # byte_fallback
    # a space before the text, no blanks removed, and blanks as U+2581
    yield _field(3, _field(1, b"identity") + _field(3, 1) + _field(4, 0) + _field(5, 1))


def _field(number: int, value: int | float | bytes) -> bytes:
    """One field of a protocol buffer: a varint, a float of four bytes, or a length and bytes."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])
