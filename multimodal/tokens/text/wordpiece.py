"""BERT's WordPiece (Devlin et al. 2019), which BLIP and GIT also use, with training."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.system.files import optional_json, read_json
from multimodal.tokens.text.chunks import BackendChunkCache
from multimodal.tokens.text.pieces import pieces_of
from multimodal.tokens.text.tokenizer import RECORD, Piece, Tokenizer, checked, naming, write_record, write_text

if TYPE_CHECKING:
    import tokenizers

FILE = "vocab.txt"
# BERT removes other blanks from words, as control characters
_AT_BLANKS = re.compile(r"[ \t\n\r]*+[^ \t\n\r]++|[ \t\n\r]++")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def bert_settings(record: dict[str, Any]) -> dict[str, Any]:
    """BERT's normalizer by tokenizer_config.json."""
    return {"lowercase": record.get("do_lower_case", True), "strip_accents": record.get("strip_accents"),
            "split_chinese": record.get("tokenize_chinese_chars", True)}  # fmt: skip


class WordPieceTokenizer(Tokenizer):
    """Equal to transformers' BertTokenizer on ordinary text; unlike it, "[SEP]" in a text is text.

    Words that the vocabulary cannot spell become [UNK]. `decode` puts spaces by BERT's convention."""

    cleanable = True

    def __init__(
        self, vocab: list[str], vocab_size: int, bos_id: int, eos_id: int, context: int | None = None,
        lowercase: bool = True, strip_accents: bool | None = None, split_chinese: bool = True,
    ):  # fmt: skip
        """`vocab`: tokens in order of id; ids from there to `vocab_size` are control tokens. `strip_accents`: default
        as `lowercase`. Raises CheckpointError."""
        ids = {token: i for i, token in enumerate(vocab)}
        for token in SPECIALS:
            if token not in ids:
                raise CheckpointError(f"the vocabulary lacks {token}")
        if len(ids) != len(vocab):
            raise CheckpointError("the vocabulary has a token twice")
        if not len(vocab) <= vocab_size:
            raise CheckpointError(f"the vocabulary has {len(vocab)} tokens, the model {vocab_size}")
        for name, value in (("bos", bos_id), ("eos", eos_id)):
            if not 0 <= value < vocab_size:
                raise CheckpointError(f"{name}_id {value!r} is outside the vocabulary of {vocab_size}")
        self.vocab, self.vocab_size, self.context = vocab, vocab_size, context
        self.bos_id, self.eos_id, self.pad_id, self.unknown_id = bos_id, eos_id, ids["[PAD]"], ids["[UNK]"]
        self.mask_id = ids["[MASK]"]
        self.lowercase, self.strip_accents, self.split_chinese = lowercase, strip_accents, split_chinese
        named = {ids[token] for token in SPECIALS} - {self.unknown_id}
        self.control = frozenset(named | {bos_id, eos_id} | set(range(len(vocab), vocab_size)))
        self._backend = _backend(ids, lowercase, strip_accents, split_chinese)
        self._chunks = BackendChunkCache(self._backend, _AT_BLANKS)

    @classmethod
    def from_bert(cls, folder: Path, vocab_size: int, bos_id: Any, eos_id: Any, context: int) -> "WordPieceTokenizer":
        """From `tokenizer.json` or else `vocab.txt` of a Hugging Face folder. `bos_id`, `eos_id`: ids or tokens. Raises
        CheckpointError."""
        path = folder / "tokenizer.json"
        if path.exists():
            vocab = _from_json(read_json(path), path)
        else:
            path = folder / FILE
            vocab = read_vocabulary(path)
        record = optional_json(folder / RECORD)  # in transformers it overrides what tokenizer.json states
        settings = bert_settings(record)
        bos_id, eos_id = (vocab.index(token) if token in vocab else token for token in (bos_id, eos_id))
        for name, value in (("bos", bos_id), ("eos", eos_id)):
            if isinstance(value, str):
                raise CheckpointError(f"{path}: the vocabulary lacks {value}")
            if type(value) is not int:
                raise CheckpointError(f"{path}: {name}_id must be an id or a token (got {value!r})")
        with naming(path):
            return cls(vocab, vocab_size, bos_id, eos_id, context, **settings)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, spare: int = 0, lowercase: bool = True, context: int | None = None
    ) -> "WordPieceTokenizer":
        """Learn a vocabulary of at most `vocab_size` ids, the last `spare` of them unnamed control tokens, such as T5's
        sentinels. bos is [CLS], eos [SEP].

        Raises UsageError if there is no room for letters, TextError without text."""
        from tokenizers import trainers

        if vocab_size - spare <= len(SPECIALS):
            raise UsageError(f"vocab_size {vocab_size}: no letters beside {len(SPECIALS) + spare} control tokens")
        specials = {token: i for i, token in enumerate(SPECIALS)}
        learner = _backend(specials, lowercase, None, True)
        texts = [learner.normalizer.normalize_str(checked(text)) for text in texts]
        words = {word for text in texts for word, _ in learner.pre_tokenizer.pre_tokenize_str(text)}
        if not words:
            raise TextError("no text to train a vocabulary on")
        # name the inner letters: the trainer would number them, and so its merges, in random order
        inner = sorted({f"##{letter}" for word in words for letter in word[1:]})[: vocab_size - spare - len(SPECIALS)]
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size - spare, special_tokens=[*SPECIALS, *inner], min_frequency=2, show_progress=False
        )
        learner.train_from_iterator(texts, trainer)
        learnt = learner.get_vocab()
        vocab = sorted(learnt, key=learnt.get)
        bos, eos = specials["[CLS]"], specials["[SEP]"]
        return cls(vocab, len(vocab) + spare, bos, eos, context, lowercase)

    def _encode(self, text: str) -> list[int]:
        return self._chunks.encode(text)

    def _decode(self, ids: list[int]) -> str:
        tokens = [self.vocab[i] if i < len(self.vocab) else f"[{i}]" for i in ids]
        return self._backend.decoder.decode(tokens) if tokens else ""

    def pipeline(self) -> dict[str, Any]:
        return json.loads(self._backend.to_str())

    def pieces(self, text: str) -> list[Piece]:
        return pieces_of(self._backend, checked(text), self.unknown_id)

    def joined(self, tokens: Sequence[str]) -> str:
        return self._backend.decoder.decode(list(tokens)) if tokens else ""

    def save(self, folder: Path | str) -> None:
        """Write `vocab.txt` and the record."""
        write_text(Path(folder) / FILE, "".join(f"{token}\n" for token in self.vocab))
        names = ("vocab_size", "bos_id", "eos_id", "context", "lowercase", "strip_accents", "split_chinese")
        write_record(folder, {"kind": "wordpiece", **{name: getattr(self, name) for name in names}}, self)


def _backend(
    vocab: dict[str, int], lowercase: bool, strip_accents: bool | None, split_chinese: bool
) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def read_vocabulary(path: Path) -> list[str]:
    """Read one token per line. Raises CheckpointError."""
    try:
        # not splitlines: some vocabularies have other separators as tokens
        tokens = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error})") from None
    if not tokens:
        raise CheckpointError(f"{path}: missing")
    return tokens[:-1] if tokens[-1] == "" else tokens


def _from_json(file: dict[str, Any], path: Path) -> list[str]:
    """Vocabulary of a `tokenizer.json`. Raises CheckpointError for another pipeline."""
    parts = {name: file.get(name) if isinstance(file.get(name), dict) else {} for name in (
        "model", "normalizer", "pre_tokenizer")}  # fmt: skip
    kinds = [parts[name].get("type") for name in parts]
    vocab = parts["model"].get("vocab")
    if kinds != ["WordPiece", "BertNormalizer", "BertPreTokenizer"] or not isinstance(vocab, dict):
        raise CheckpointError(f"{path}: expected BERT's WordPiece pipeline, got {', '.join(map(str, kinds))}")
    if sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str):
        raise CheckpointError(f"{path}: the vocabulary's ids must be 0 to {len(vocab) - 1}, each once")
    return sorted(vocab, key=vocab.get)


def wordpiece_from(folder: Path, settings: dict[str, Any]) -> WordPieceTokenizer:
    """Build from a record and the vocabulary beside it."""
    with naming(folder / FILE):
        return WordPieceTokenizer(read_vocabulary(folder / FILE), **settings)
