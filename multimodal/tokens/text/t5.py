"""T5's and ByT5's vocabularies with the sentinels of masked spans (Raffel et al. 2020, section 3.1.4)."""

import re
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json, write_whole
from multimodal.tokens.text.hub.added import added_tokens
from multimodal.tokens.text.hub.build import SPLIT, unigram_tokenizer
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.hub.pipeline import FILE as PIPELINE
from multimodal.tokens.text.languages import SENTINEL, sentinels_of
from multimodal.tokens.text.sentencepiece import ByteTokenizer, SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer, with_names, write_record

FILE = "spiece.model"
NAMES = {"eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
SENTINELS = 100


class T5Text(SentencePieceTokenizer):
    """SentencePiece model with sentinels: T5's follow its pieces, in descending order; mT5's are pieces. No text yields
    either."""

    cleanable = True

    def __init__(self, path: Path | str, sentinels: int, vocab_size: int, context: int | None = None):
        """`sentinels`: their number if the file has none. Raises CheckpointError if they exceed `vocab_size`, or the
        file has no eos."""
        super().__init__(path, context=context, vocab_size=vocab_size, proto=without_sentinels(Path(path)))
        if self.eos_id is None:
            raise CheckpointError(f"{self.path}: has no eos id")
        names = map(self._model.id_to_piece, range(self._pieces))
        self.names = {name: i for i, name in enumerate(names) if SENTINEL.fullmatch(name)}
        if not self.names:
            if sentinels > max(0, vocab_size - self._pieces):  # checked first, since a file can claim any number
                raise CheckpointError(
                    f"{self.path}: {self._pieces} tokens and {sentinels} sentinels exceed the model's {vocab_size} ids"
                )
            self.names = {f"<extra_id_{i}>": self._pieces + sentinels - 1 - i for i in range(sentinels)}
        self.sentinel_ids = sentinels_of(self.names)
        self._names |= {i: f"<extra_id_{number}>" for number, i in enumerate(self.sentinel_ids)}
        self.control = frozenset(self._names)

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, self._model.serialized_model_proto())
        record = {"kind": "t5", "sentinels": len(self.sentinel_ids), "vocab_size": self.vocab_size}
        write_record(folder, record | ({} if self.context is None else {"context": self.context}), self)


class ByT5Text(ByteTokenizer):
    """ByT5's bytes, then the sentinels as transformers numbers them. (The released models were trained with the bytes
    255, 254, … as sentinels, ids 258, 257, …: Xue et al. 2022, section 3.)"""

    cleanable = True

    def __init__(self, sentinels: int = 125, context: int | None = None):
        self.context = context
        self.vocab_size = ByteTokenizer.vocab_size + sentinels
        self.sentinel_ids = tuple(range(ByteTokenizer.vocab_size, self.vocab_size))
        self.control = ByteTokenizer.control | frozenset(self.sentinel_ids)

    def _decode(self, ids: list[int]) -> str:
        names = {i: f"<extra_id_{number}>" for number, i in enumerate(self.sentinel_ids)}
        return with_names(ids, names, super()._decode)

    def save(self, folder: Path | str) -> None:
        record = {"kind": "byt5", "sentinels": len(self.sentinel_ids)}
        write_record(folder, record | ({} if self.context is None else {"context": self.context}), self)


def t5_from(folder: Path, settings: dict[str, Any]) -> T5Text:
    """Build from a record and the model beside it."""
    return T5Text(folder / FILE, **settings)


def t5_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """Tokenizer of a Hugging Face folder, or None. Raises CheckpointError for an unusable file, or one that does not
    fit the model."""
    if folder is None:
        return None
    size = config["vocab_size"]
    record = optional_json(folder / RECORD)
    if record.get("tokenizer_class") == "ByT5Tokenizer":
        if size < ByteTokenizer.vocab_size:
            raise CheckpointError(f"{folder / RECORD}: bytes need {ByteTokenizer.vocab_size} ids, the model has {size}")
        return ByT5Text(size - ByteTokenizer.vocab_size)
    if (folder / FILE).is_file() and not (folder / PIPELINE).is_file():
        sentinels = record.get("extra_ids", SENTINELS)
        if type(sentinels) is not int or sentinels < 0:
            raise CheckpointError(f"{folder / RECORD}: extra_ids must be a number of sentinels (got {sentinels!r})")
        made = T5Text(folder / FILE, sentinels, size)
        ids = [token["id"] for token in added_tokens(folder)]
        if not any(i >= size or f"[{i}]" in made.control_names for i in ids):  # each has a token of the file
            return made
        own = without_sentinels(folder / FILE)  # a pipeline of transformers, as SentencePiece knows no added tokens
        more = () if own else tuple(f"<extra_id_{i}>" for i in reversed(range(sentinels)))
        return unigram_tokenizer(folder / FILE, SPLIT, NAMES, config, size, more=more, proto=own)
    return hub_tokenizer(folder, config)


def without_sentinels(path: Path) -> bytes | None:
    """SentencePiece model with its sentinels as control pieces, which no text yields; None: the file as it is. Raises
    CheckpointError."""
    data = path.read_bytes() if path.is_file() else b""
    if b"<extra_id_" not in data:
        return None
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    try:
        model = ModelProto.FromString(data)
        for piece in model.pieces:
            if re.search(r"<extra_id_\d+>", piece.piece):
                piece.type = piece.CONTROL
    except (DecodeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a SentencePiece model ({error})") from None
    return model.SerializeToString()
