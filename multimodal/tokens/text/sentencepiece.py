"""SentencePiece models (T5, SigLIP, Llama) and ByT5's bytes."""

import base64
import codecs
import math
import re
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import read_json_value, shown, write_whole
from multimodal.tokens.text.hub.patterns import check_growth
from multimodal.tokens.text.tokenizer import MARK, Tokenizer, checked, with_names, write_record


def canonicalize(text: str) -> str:
    """SigLIP's canonical form: lower case, no ASCII punctuation ("_" is a space), single spaces (big_vision)."""
    plain = text.replace("_", " ").translate(str.maketrans("", "", string.punctuation))
    return " ".join(plain.lower().split())


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece model file as T5 uses it: text and eos, no bos, padded with the file's pad id."""

    def __init__(
        self, path: Path | str, pad_id: int | None = None, add_bos: bool = False, canonical: bool = False,
        context: int | None = None, pad_to_length: bool = False, vocab_size: int | None = None,
        proto: bytes | None = None, added: Sequence[str] = (), prepend_scheme: str = "always", puts_end: bool = False,
    ):  # fmt: skip
        """`pad_id`: overrides the file's. `canonical`: apply `canonicalize`. `vocab_size`: rows of the model's
        embedding; those beyond the file's are control ids. `proto`: the model, if it was made from another kind of
        file. `added`: pieces that are found in a text before the model splits the rest. `prepend_scheme`: where the
        model puts its space before a text: "always", so also behind such a piece and a template's control tokens, or
        "first", at the beginning alone (transformers' `legacy` False). Raises CheckpointError for a file that is not a
        model, does not fit `vocab_size`, or lacks the pad or bos id."""
        self.path = Path(path)
        self._model = pieces_model(self.path, proto)
        self._pieces = self._model.vocab_size()
        self.vocab_size = self._pieces if vocab_size is None else vocab_size
        if not self._pieces <= self.vocab_size < 2 * self._pieces:
            raise CheckpointError(f"{self.path}: has {self._pieces} tokens, the model {self.vocab_size}")
        self.pad_id = self._model.pad_id() if pad_id is None else pad_id
        if not 0 <= self.pad_id < self.vocab_size:
            raise CheckpointError(f"{self.path}: pad id {self.pad_id} is outside its vocabulary of {self.vocab_size}")
        self.eos_id = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.bos_id = self._model.bos_id() if add_bos else None
        self.unknown_id = self._model.unk_id()
        if self.bos_id == -1:
            raise CheckpointError(f"{self.path}: add_bos, but the model has no bos id")
        self.canonical, self.context, self.pad_to_length = canonical, context, pad_to_length
        self._names = {i: self._model.id_to_piece(i) for i in range(self._pieces) if self._model.is_control(i)}
        unused = (i for i in range(self._pieces) if self._model.is_unused(i))
        self._names |= {i: f"[{i}]" for i in (*unused, *range(self._pieces, self.vocab_size))}
        self.control = frozenset(self._names)
        self.added, self.prepend_scheme, self.puts_end = tuple(added), prepend_scheme, puts_end
        if prepend_scheme not in ("always", "first"):
            raise CheckpointError(f"{self.path}: prepend_scheme must be always or first (got {prepend_scheme!r:.40})")
        if missing := [name for name in added if self._model.piece_to_id(name) == self.unknown_id]:
            raise CheckpointError(f"{self.path}: has no piece {missing[0]!r:.40}")

    @property
    def control_names(self) -> Mapping[str, int]:
        return {name: i for i, name in self._names.items()}

    def _encode(self, text: str) -> list[int]:
        return self._split(canonicalize(text) if self.canonical else text, {})

    def encode_template(self, text: str) -> list[int]:
        return self._split(checked(text), self.control_names)

    def _split(self, text: str, control: Mapping[str, int]) -> list[int]:
        """Ids of a text with names of control tokens."""
        names = {**control, **{name: self._model.piece_to_id(name) for name in self.added}}
        if not names:
            return self._model.encode(text)
        pattern, ids = "|".join(map(re.escape, sorted(names, key=len, reverse=True))), []
        for number, part in enumerate(re.split(f"({pattern})", text)):  # texts and names alternate
            model = self._inner if number and self.prepend_scheme == "first" else self._model
            ids += [names[part]] if number % 2 else model.encode(part.replace(MARK, ""))
        return ids

    @cached_property
    def _inner(self) -> Any:
        """The model without a space before the text."""
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        model = ModelProto.FromString(self.proto())
        model.normalizer_spec.add_dummy_prefix = False
        return pieces_model(self.path, model.SerializeToString())

    def _decode(self, ids: list[int]) -> str:
        return with_names(ids, self._names, self._model.decode)  # the library drops control pieces

    def proto(self) -> bytes:
        """The SentencePiece model."""
        return self._model.serialized_model_proto()

    def special_names(self) -> dict[int, str]:
        """Names of control tokens, the unknown one and those that are added, by their ids."""
        kept = (i for i in range(self._pieces) if self._model.is_control(i) or i == self.unknown_id)
        return {i: self._model.id_to_piece(i) for i in (*kept, *map(self._model.piece_to_id, self.added))}

    def save(self, folder: Path | str) -> None:
        """Write the model and the record."""
        target = Path(folder) / self.path.with_suffix(".model").name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, self._model.serialized_model_proto())
        names = ("pad_id", "canonical", "context", "pad_to_length", "vocab_size")
        settings = {key: getattr(self, key) for key in names}
        optional = {"added": list(self.added)} if self.added else {}
        optional |= {"prepend_scheme": "first"} if self.prepend_scheme == "first" else {}
        optional |= {"puts_end": True} if self.puts_end else {}
        record = {"kind": "sentencepiece", "file": target.name, "add_bos": self.bos_id is not None}
        write_record(folder, record | settings | optional, self)


class SigLIPText(SentencePieceTokenizer):
    """SigLIP's text (Zhai et al. 2023): canonical, eos, padded to 64 with the eos id 1. The model attends to its
    padding, so wrong padding ruins the scores."""

    def __init__(self, path: Path | str, context: int = 64):
        super().__init__(path, pad_id=1, canonical=True, context=context, pad_to_length=True)
        if self.eos_id != 1:
            raise CheckpointError(f"{self.path}: SigLIP's eos id must be 1 (got {self.eos_id})")


class ByteTokenizer(Tokenizer):
    """ByT5's ids (Xue et al. 2022): byte + 3, after `<pad>` 0, `</s>` 1 and `<unk>` 2. `decode` drops invalid bytes, as
    transformers, but a character that the last ones begin is U+FFFD, since a stream waits for the rest."""

    vocab_size = 259
    pad_id, eos_id = 0, 1
    control = frozenset({0, 1, 2})

    def _encode(self, text: str) -> list[int]:
        return [byte + 3 for byte in text.encode("utf-8")]

    def _decode(self, ids: list[int]) -> str:
        names = (b"<pad>", b"</s>", b"<unk>")
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        text = decoder.decode(b"".join(names[i] if i < 3 else bytes([i - 3]) for i in ids))
        return text + "\ufffd" * bool(decoder.getstate()[0])

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "bytes"})


def pieces_model(path: Path, proto: bytes | None = None) -> Any:
    """SentencePieceProcessor of a file, or of its content `proto`. Raises CheckpointError."""
    import sentencepiece
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        proto = proto or path.read_bytes()
        if not proto:  # the library would accept it and write to stderr later
            raise RuntimeError("the file is empty")
        model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not a SentencePiece model ({error})") from None
    content = ModelProto.FromString(model.serialized_model_proto())
    for rules in (content.normalizer_spec, content.denormalizer_spec):
        try:
            check_growth({"precompiled_charsmap": base64.b64encode(rules.precompiled_charsmap).decode()})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
    return model


def extended_model(
    path: Path, tokens: Sequence[dict[str, Any]], roles: Mapping[str, str], prefix: bool = True
) -> tuple[bytes, list[str]]:  # fmt: skip
    """The model of a file with tokens that a folder adds, as `added_tokens` lists them, and the names of those that are
    not special. `roles`: names of `bos` and `eos`. `prefix`: False drops the space before a text.
    Raises CheckpointError for a token whose id is another piece's, or that takes the blanks beside it."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model, kind = ModelProto.FromString(pieces_model(path).serialized_model_proto()), ModelProto.SentencePiece
    model.normalizer_spec.add_dummy_prefix &= prefix
    ids = {piece.piece: i for i, piece in enumerate(model.pieces)}
    most = 2 * len(ids)
    for token in tokens:
        name, i = token["content"], token["id"]
        if taken := [flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]]:
            raise CheckpointError(f"{path}: added token {name!r:.40} with {taken[0]} is not supported")
        if name in ids:
            continue
        if not len(model.pieces) <= i < most:
            raise CheckpointError(f"{path}: added token {name!r:.40} has id {i}, beside {len(model.pieces)} pieces")
        for number in range(len(model.pieces), i):
            model.pieces.add(piece=f"[{number}]", type=kind.UNUSED)
        model.pieces.add(piece=name, type=kind.USER_DEFINED)
        ids[name] = i
    special = {*roles.values(), *(token["content"] for token in tokens if token["special"])} & ids.keys()
    for name in special:
        if model.pieces[ids[name]].type != kind.UNKNOWN:
            model.pieces[ids[name]].type = kind.CONTROL
    for role in ("bos", "eos"):
        if roles.get(role) in ids:
            setattr(model.trainer_spec, f"{role}_piece", roles[role])
    special |= {piece.piece for piece in model.pieces if piece.type in (kind.UNKNOWN, kind.CONTROL)}
    return model.SerializeToString(), [token["content"] for token in tokens if token["content"] not in special]


def sentencepiece_from(folder: Path, settings: dict[str, Any]) -> SentencePieceTokenizer:
    """Build from a record; the file must lie in the folder itself."""
    name = settings.pop("file")
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(f"{folder}: tokenizer file must be a plain file name (got {name!r})")
    return SentencePieceTokenizer(folder / name, **settings)


NAMES = ("<unk>", "<s>", "</s>")  # ids 0, 1 and 2, whatever the list calls them
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def scored_tokenizer(path: Path, size: int, context: int | None = None) -> SentencePieceTokenizer:
    """Byte-pair encoding from a JSON list of [piece, score] with byte fallback; texts get a bos and a leading space
    (llama2.c, `encode`).

    The list is turned into a SentencePiece model. `size`: rows of the model's embedding. Raises CheckpointError."""
    pieces = read_json_value(path)
    if not isinstance(pieces, list) or not all(map(_is_scored, pieces)):
        raise CheckpointError(f"{path}: expected a list of pieces and scores, got {shown(pieces)}")
    if missing := BYTES - {piece for piece, _ in pieces[3:]}:
        raise CheckpointError(f"{path}: lacks {len(missing)} of the 256 bytes, first {min(missing)}")
    return SentencePieceTokenizer(path, pad_id=2, add_bos=True, context=context, vocab_size=size, proto=_model(pieces))


def is_scored(path: Path) -> bool:
    """Return True if a JSON file holds a list."""
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


def _is_scored(pair: Any) -> bool:
    ok = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and pair[0] != ""
    return ok and type(pair[1]) in (int, float) and math.isfinite(pair[1])


def _model(pieces: list[Any]) -> bytes:
    """SentencePiece model of the pieces and scores."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model, kind = ModelProto(), ModelProto.SentencePiece
    for i, (piece, score) in enumerate(pieces):
        own = (kind.UNKNOWN, kind.CONTROL, kind.CONTROL)[i] if i < 3 else kind.BYTE if piece in BYTES else kind.NORMAL
        model.pieces.add(piece=NAMES[i] if i < 3 else piece.replace(" ", "\u2581"), score=score, type=own)
    trainer, normal = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size, trainer.byte_fallback = trainer.BPE, len(pieces), True
    # a space before the text, no blanks removed, and blanks as U+2581
    normal.name, normal.add_dummy_prefix, normal.remove_extra_whitespaces = "identity", True, False
    normal.escape_whitespaces = True
    return model.SerializeToString()
