"""Tokenizers of translators: SentencePiece pieces with ids from a separate table, and language tokens (M2M100,
Marian)."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json, read_json, write_whole
from multimodal.tokens.text.hub.added import added_tokens
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.languages import languages_of
from multimodal.tokens.text.sentencepiece import pieces_model
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer, checked, naming, write_record, write_text

SOURCE, TARGET, VOCAB, PIECES = "source.spm", "target.spm", "vocab.json", "sentencepiece.bpe.model"
TARGET_VOCAB = "target_vocab.json"
END, PAD, UNKNOWN = "</s>", "<pad>", "<unk>"
SPACE = "▁"
# in the order of their ids, after those of vocab.json (fairseq, examples/m2m_100)
_M2M100 = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy
    id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd
    si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""
_WMT21 = "en ha is ja cs ru zh de"
CODES = {"m2m100": tuple(_M2M100.split()), "wmt21": tuple(_WMT21.split())}


class PiecesTokenizer(Tokenizer):
    """Equal to transformers' M2M100Tokenizer and MarianTokenizer on ordinary text; unlike there, "__de__" and "</s>" in
    a text are text. Pieces missing from the table are unknown."""

    cleanable = True

    def __init__(
        self, source: Path, target: Path, vocab: dict[str, Any], vocab_size: int, languages: dict[str, Any],
        language_in_source: bool = False, added: dict[str, int] | None = None,
        target_vocab: dict[str, Any] | None = None,
    ):  # fmt: skip
        """`languages`: names and ids of their tokens, such as `__de__` or `>>deu<<`. `added`: further tokens, which are
        found in a text before it is split into pieces. `target_vocab`: the table of translations, if it is another.
        Raises CheckpointError for a file that is not a model, and a table that does not fit."""
        self._source, self._target = pieces_model(source), None if target == source else pieces_model(target)
        self.vocab, self.vocab_size, self.languages, self.added = vocab, vocab_size, languages, added or {}
        self.target_vocab = target_vocab
        written = vocab if target_vocab is None else target_vocab
        self._check(self._source, vocab, "source")
        self._check(self._target or self._source, written, "target")
        self.language_in_source = language_in_source
        self.language_ids = languages_of(languages)
        self.eos_id, self.pad_id, self.unknown_id = (vocab[name] for name in (END, PAD, UNKNOWN))
        self._names: list[str | None] = [None] * vocab_size
        for name, i in (written | languages | self.added).items():
            self._names[i] = name
        special = {"<s>", END, PAD, *languages}
        self.control = frozenset(i for i, name in enumerate(self._names) if name is None or name in special)
        self._ids, self._target_ids = ({one: i for one, i in table.items() if one not in special}
                                       for table in (vocab, written))  # fmt: skip
        longest = sorted(self.added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    def _check(self, model: Any, vocab: dict[str, Any], side: str) -> None:
        others = self.languages | self.added
        ids = [*vocab.values(), *(i for name, i in others.items() if name not in vocab)]
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in ids) or len(set(ids)) < len(ids):
            raise CheckpointError(f"the table's ids must be unique and below {self.vocab_size}")
        if 2 * len(ids) < self.vocab_size:
            raise CheckpointError(f"the table has {len(ids)} tokens, the model {self.vocab_size}")
        for name in (END, PAD, UNKNOWN):
            if name not in vocab:
                raise CheckpointError(f"the table lacks {name}")
            if vocab[name] != self.vocab.get(name):
                raise CheckpointError(f"{name} is {self.vocab.get(name)} in a source, {vocab[name]} in a target")
        size = model.vocab_size()
        known = sum(model.id_to_piece(i) in vocab for i in range(size))
        if 2 * known < size:
            raise CheckpointError(f"the table has {known} of the {size} pieces of the {side} model")

    def _encode(self, text: str) -> list[int]:
        return self._numbers(self._source, text, self._ids)

    def encode_target(self, text: str) -> list[int]:
        """Ids of a translation, by the target's SentencePiece model. Raises TextError as `encode` does."""
        return self._numbers(self._target or self._source, checked(text), self._target_ids)

    def _numbers(self, model: Any, text: str, table: dict[str, int]) -> list[int]:
        ids = []
        for number, part in enumerate(self._split.split(text)):  # texts and added tokens alternate
            if number % 2:
                ids.append(self.added[part])
            else:  # by name: an unknown piece comes as its text, which may be a piece of the other side
                ids += [table.get(piece, self.unknown_id) for piece in model.encode(part, out_type=str)]
        return ids

    def _decode(self, ids: list[int]) -> str:
        pieces = [self._names[i] or f"[{i}]" for i in ids]
        return "".join(pieces).replace(SPACE, " ").strip()

    def save(self, folder: Path | str) -> None:
        """Write models, table and record."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for model, name in ((self._source, SOURCE), (self._target, TARGET)):
            if model is not None:
                write_whole(folder / name, model.serialized_model_proto())
        write_text(folder / VOCAB, json.dumps(self.vocab, ensure_ascii=False) + "\n")
        if self.target_vocab is not None:
            write_text(folder / TARGET_VOCAB, json.dumps(self.target_vocab, ensure_ascii=False) + "\n")
        settings = {"two_models": self._target is not None, "languages": self.languages, "vocab_size": self.vocab_size}
        settings |= {"added": self.added} if self.added else {}
        settings |= {"two_tables": True} if self.target_vocab is not None else {}
        write_record(folder, {"kind": "pieces", "language_in_source": self.language_in_source, **settings}, self)


def pieces_from(folder: Path, settings: dict[str, Any]) -> PiecesTokenizer:
    """Build from a record and the files beside it."""
    target = folder / (TARGET if settings.pop("two_models") else SOURCE)
    written = read_json(folder / TARGET_VOCAB) if settings.pop("two_tables", False) else None
    return _from_files(folder, folder / SOURCE, target, target_vocab=written, **settings)


def m2m100_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """Tokenizer of a Hugging Face folder with M2M100's files or NLLB's `tokenizer.json`, or None. Raises
    CheckpointError."""
    if folder is None or not (folder / VOCAB).is_file():
        if folder and optional_json(folder / RECORD).get("legacy_behaviour"):
            cause = "legacy_behaviour True (a source's language after its text) is not supported"
            raise CheckpointError(f"{folder / RECORD}: {cause}")
        made = hub_tokenizer(folder, config)
        if made is None and folder and (path := folder / PIECES).is_file():
            warnings.warn(f"{path}: not read without {VOCAB} (M2M100) or tokenizer.json (NLLB) beside it", stacklevel=2)
        return made
    record = optional_json(folder / RECORD)
    if (name := record.get("tokenizer_class") or "M2M100Tokenizer") != "M2M100Tokenizer":  # SMALL100's: a target first
        raise CheckpointError(f"{folder / RECORD}: expected tokenizer_class M2M100Tokenizer (got {name!r:.40})")
    kind = record.get("language_codes", "m2m100")
    if kind not in CODES:
        raise CheckpointError(f"{folder / RECORD}: language_codes must be one of {', '.join(CODES)} (got {kind!r:.40})")
    vocab = read_json(folder / VOCAB)
    languages = {f"__{code}__": len(vocab) + i for i, code in enumerate(CODES[kind])}
    model, added = folder / PIECES, _added(folder, vocab | languages)
    return _from_files(folder, model, model, vocab_size=config["vocab_size"], languages=languages, added=added)


def marian_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """Tokenizer of a Hugging Face folder with Marian's files, or None, also where the sides have vocabularies of
    different sizes. Raises CheckpointError."""
    size = config["vocab_size"]
    if folder is None or not (folder / VOCAB).is_file() or size != (config.get("decoder_vocab_size") or size):
        return None
    separate, vocab = optional_json(folder / RECORD).get("separate_vocabs"), read_json(folder / VOCAB)
    languages = {name: i for name, i in vocab.items() if name.startswith(">>") and name.endswith("<<") and not separate}
    written = read_json(folder / TARGET_VOCAB) if separate else None
    settings = {"vocab_size": size, "languages": languages, "language_in_source": True}
    added = _added(folder, vocab | (written or {}))
    return _from_files(folder, folder / SOURCE, folder / TARGET, added=added, target_vocab=written, **settings)


def _from_files(folder: Path, source: Path, target: Path, **settings: Any) -> PiecesTokenizer:
    with naming(folder / VOCAB):
        return PiecesTokenizer(source, target, read_json(folder / VOCAB), **settings)


def _added(folder: Path, known: dict[str, Any]) -> dict[str, int]:
    """Ids of added tokens other than special and `known` ones. Raises CheckpointError for flags."""
    tokens = [token for token in added_tokens(folder) if not token["special"] and token["content"] not in known]
    for token in tokens:
        if flag := next((name for name in ("single_word", "lstrip", "rstrip") if token[name]), None):
            raise CheckpointError(f"{folder / RECORD}: added token {token['content']!r:.40}: {flag} is not supported")
    return {token["content"]: token["id"] for token in tokens}
