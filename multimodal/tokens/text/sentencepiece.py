"""Vocabularies that others made: SentencePiece models (T5, SigLIP), and ByT5's bytes."""

import math
import string
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import read_json_value, shown, write_whole
from multimodal.tokens.text.tokenizer import Tokenizer, write_record


def canonicalize(text: str) -> str:
    """SigLIP's canonical text: lower case, no ASCII punctuation ("_" is a space), single spaces (big_vision)."""
    plain = text.replace("_", " ").translate(str.maketrans("", "", string.punctuation))
    return " ".join(plain.lower().split())


class SentencePieceTokenizer(Tokenizer):
    """The ids of a SentencePiece model file, as T5 uses it: text and eos, no bos, padded with the file's pad id.

    `pad_id` overrides the file's; a file without one needs it. `canonical` puts text through `canonicalize`.
    """

    def __init__(
        self,
        path: Path | str,
        pad_id: int | None = None,
        add_bos: bool = False,
        canonical: bool = False,
        context: int | None = None,
        pad_to_length: bool = False,
        vocab_size: int | None = None,
        proto: bytes | None = None,
    ):
        """`vocab_size`: ids of the model, where they are more than the file's; those are control ids. `proto`: the
        model, where it is made from a file of another kind. Raises
        CheckpointError naming the file when it is no model, does not go with that size, or lacks an id asked for."""
        self.path = Path(path)
        self._model = pieces_model(self.path, proto)
        self._held = self._model.vocab_size()
        self.vocab_size = self._held if vocab_size is None else vocab_size
        if not self._held <= self.vocab_size < 2 * self._held:
            raise CheckpointError(f"{self.path}: a vocabulary of {self._held}, the model's has {self.vocab_size}")
        self.pad_id = self._model.pad_id() if pad_id is None else pad_id
        if not 0 <= self.pad_id < self.vocab_size:
            raise CheckpointError(f"{self.path}: pad id {self.pad_id} is not in its vocabulary of {self.vocab_size}")
        self.eos_id = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.bos_id = self._model.bos_id() if add_bos else None
        if self.bos_id == -1:
            raise CheckpointError(f"{self.path}: add_bos, but the model has no bos id")
        self.canonical, self.context, self.pad_to_length = canonical, context, pad_to_length
        named = {i for i in range(self._held) if self._model.is_control(i)}
        self.control = frozenset(named | set(range(self._held, self.vocab_size)))

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(canonicalize(text) if self.canonical else text)

    def _decode(self, ids: list[int]) -> str:
        text, plain = [], []
        for i in ids:  # the library drops control pieces, so they are written out here
            if i in self.control:
                text += [self._model.decode(plain), self._name(i)]
                plain = []
            else:
                plain.append(i)
        return "".join([*text, self._model.decode(plain)])

    def _name(self, i: int) -> str:
        return self._model.id_to_piece(i) if i < self._held else f"[{i}]"

    def save(self, folder: Path | str) -> None:
        """Write the model and the record."""
        target = Path(folder) / self.path.with_suffix(".model").name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, self._model.serialized_model_proto())
        names = ("pad_id", "canonical", "context", "pad_to_length", "vocab_size")
        settings = {key: getattr(self, key) for key in names}
        add_bos = self.bos_id is not None
        write_record(folder, {"kind": "sentencepiece", "file": target.name, "add_bos": add_bos, **settings})


class SigLIPText(SentencePieceTokenizer):
    """SigLIP's text (Zhai et al. 2023): canonical, eos, padded to 64 with the eos id 1.

    Wrong padding is not seen in shapes but ruins the scores: the model attends to its padding.
    """

    def __init__(self, path: Path | str, context: int = 64):
        super().__init__(path, pad_id=1, canonical=True, context=context, pad_to_length=True)
        if self.eos_id != 1:
            raise CheckpointError(f"{self.path}: eos id {self.eos_id}, where SigLIP's vocabulary has 1")


class ByteTokenizer(Tokenizer):
    """ByT5's ids (Xue et al. 2022): byte + 3, after `<pad>` 0, `</s>` 1 and `<unk>` 2. No training, no surprises."""

    vocab_size = 259
    pad_id, eos_id = 0, 1
    control = frozenset({0, 1, 2})

    def _encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in text.encode("utf-8")]

    def _decode(self, ids: list[int]) -> str:
        names = (b"<pad>", b"</s>", b"<unk>")
        return b"".join(names[i] if i < 3 else bytes([i - 3]) for i in ids).decode("utf-8", errors="replace")

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "bytes"})


def pieces_model(path: Path, proto: bytes | None = None) -> Any:
    """A `SentencePieceProcessor` of a file, or of its content where that is given. Raises CheckpointError."""
    import sentencepiece

    try:
        proto = proto or path.read_bytes()
        if not proto:  # which the library takes for a model, and writes its own lines about to stderr later
            raise RuntimeError("the file is empty")
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: no SentencePiece model: {error}") from None


def sentencepiece_from(folder: Path, settings: dict[str, Any]) -> SentencePieceTokenizer:
    """Build from a record; the file must lie in the folder itself, whatever the record says."""
    name = settings.pop("file")
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(f"{folder}: tokenizer file {name!r} is not a plain file name")
    return SentencePieceTokenizer(folder / name, **settings)


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
