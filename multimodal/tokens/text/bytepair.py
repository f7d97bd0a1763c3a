"""Byte-level byte-pair encoding with training. Every text has ids, which decode to the same bytes."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.errors import CheckpointError, TextError, UsageError
from multimodal.system.files import read_json
from multimodal.tokens.text.chunks import BackendChunkCache
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer, checked, naming, with_names, write_record, write_text

if TYPE_CHECKING:
    import tokenizers

SPECIALS = ("<pad>", "<bos>", "<eos>")
FILE = "tokenizer.json"
SMALLEST = len(SPECIALS) + 256


class BytePairTokenizer(Tokenizer):
    """Byte-level BPE as in GPT-2 (Radford et al. 2019), with `<pad>` 0, `<bos>` 1 and `<eos>` 2.

    Control tokens are not registered with the backend, so "<eos>" in a text stays five bytes. Tokens of `languages`,
    for translation, come last.
    """

    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(
        self, vocab: dict[str, int], merges: list[tuple[str, str]], lowercase: bool = False,
        languages: Sequence[str] = (),
    ):  # fmt: skip
        """`vocab` from byte-alphabet strings to ids 0..n-1, `merges` in order of rank. Raises CheckpointError."""
        _check(vocab, merges)
        self.lowercase = lowercase
        self.language_ids = {code: len(vocab) + i for i, code in enumerate(languages)}
        if len(self.language_ids) < len(languages):
            raise CheckpointError(f"languages must be unique (got {', '.join(languages)})")
        self.vocab_size = len(vocab) + len(languages)
        self.control = frozenset({0, 1, 2, *self.language_ids.values()})
        self._backend = _backend(vocab, merges, lowercase)
        self._chunks = BackendChunkCache(self._backend)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, lowercase: bool = False, languages: Sequence[str] = ()
    ) -> "BytePairTokenizer":
        """Learn a vocabulary of at most `vocab_size` ids (fewer if fewer pairs occur twice), not counting `languages`.

        Raises UsageError below 259 ids (256 bytes and three control tokens), TextError without text.
        """
        from tokenizers import pre_tokenizers, trainers

        if vocab_size < SMALLEST:
            raise UsageError(f"vocab_size: must be at least {SMALLEST}, 256 bytes and 3 controls (got {vocab_size})")
        if isinstance(texts, str):
            raise TextError("texts: expected an iterable of texts, got one string")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        )  # fmt: skip
        learner = _backend({}, [], lowercase)
        has_text = False

        def each():
            nonlocal has_text
            for text in texts:
                has_text = has_text or bool(text.strip())
                yield checked(text)

        learner.train_from_iterator(each(), trainer)
        if not has_text:
            raise TextError("no text to train a vocabulary on")
        trained = json.loads(learner.to_str())["model"]
        return cls(trained["vocab"], [tuple(pair) for pair in trained["merges"]], lowercase, languages)

    def save(self, folder: Path | str) -> None:
        """Write `tokenizer.json` (as the `tokenizers` library does) and the record."""
        folder = Path(folder)
        write_text(folder / FILE, self._backend.to_str(pretty=True))
        optional = {"languages": list(self.language_ids)} if self.language_ids else {}
        record = {"kind": "bpe", "vocab_size": self.vocab_size, "lowercase": self.lowercase, **optional}
        write_record(folder, record)

    def pipeline(self) -> dict[str, Any]:
        return json.loads(self._backend.to_str())

    def token_bytes(self) -> list[bytes]:
        """Bytes of each id in order; a control token's are its name."""
        names = sorted(self._backend.get_vocab(), key=self._backend.get_vocab().get)
        byte_of = {letter: byte for byte, letter in byte_letters().items()}
        learnt = [name.encode() if name in SPECIALS else bytes(byte_of[c] for c in name) for name in names]
        return learnt + [f"<{code}>".encode() for code in self.language_ids]

    def _encode(self, text: str) -> list[int]:
        return self._chunks.encode(text)

    def _decode(self, ids: list[int]) -> str:
        names = {i: f"<{code}>" for code, i in self.language_ids.items()}
        return with_names(ids, names, lambda run: self._backend.decode(run, skip_special_tokens=False))


def bytepair_from(folder: Path, settings: dict[str, Any]) -> BytePairTokenizer:
    """Build from a record and the vocabulary beside it. Raises CheckpointError for files that do not agree."""
    size = settings.pop("vocab_size")
    with naming(folder / FILE):
        tokenizer = BytePairTokenizer(*_model(read_json(folder / FILE)), **settings)
        if tokenizer.vocab_size != size:
            raise CheckpointError(f"has {tokenizer.vocab_size} tokens, {RECORD} has {size}")
    return tokenizer


def byte_letters() -> dict[int, str]:
    """GPT-2's visible character of each byte, in CLIP's order: itself, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """The content of a `tokenizer.json` with GPT-2's words."""
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": merges}  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": words, "post_processor": None, "decoder": words, "model": model}  # fmt: skip


def _backend(vocab: dict[str, int], merges: list[tuple[str, str]], lowercase: bool) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _model(file: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a file that `save` wrote."""
    model = file.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise CheckpointError("holds no BPE model")
    if file.get("added_tokens"):
        raise CheckpointError("registers control tokens, so texts could spell them")
    if (file.get("pre_tokenizer") or {}).get("type") != "ByteLevel":
        raise CheckpointError("is not byte-level")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        raise CheckpointError("the vocabulary must map tokens to ids")
    pairs = isinstance(merges, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in merges)
    if not pairs or not all(isinstance(part, str) for pair in merges for part in pair):
        raise CheckpointError("the merges must be a list of pairs")
    return vocab, [tuple(pair) for pair in merges]


def _check(vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    from tokenizers import pre_tokenizers

    if sorted(vocab.values()) != list(range(len(vocab))):
        raise CheckpointError(f"the vocabulary's ids must be 0 to {len(vocab) - 1}, each once")
    for token_id, token in enumerate(SPECIALS):
        if vocab.get(token) != token_id:
            raise CheckpointError(f"{token} has id {vocab.get(token)}, not {token_id}")
    if missing := sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab)):
        raise CheckpointError(f"the vocabulary lacks {len(missing)} of the 256 bytes, first {missing[0]!r}")
    if outside := [token for a, b in merges for token in (a, b, a + b) if token not in vocab]:
        raise CheckpointError(f"a merge uses {outside[0]!r}, which the vocabulary lacks")
    if spelled := [a + b for a, b in merges if a + b in SPECIALS]:
        raise CheckpointError(f"a merge spells the control token {spelled[0]}")
