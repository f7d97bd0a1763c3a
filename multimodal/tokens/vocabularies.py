"""Vocabularies that others made: CLIP's, SentencePiece models (T5, SigLIP), and ByT5's bytes."""

import gzip
import html
import shutil
import string
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.tokenizer import Tokenizer, write_record

if TYPE_CHECKING:
    import tokenizers

_CLIP_MERGES = 49152 - 256 - 2  # the file holds more lines than CLIP was trained with
# the words of CLIP, without the two control tokens that the reference's pattern lets a user spell
_CLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
_END = "</w>"  # marks the last piece of a word


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter of each byte, in the order in which CLIP numbers them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


@lru_cache(maxsize=1)
def _clip_backend() -> tuple["tokenizers.Tokenizer", list[str]]:
    """The BPE and its tokens in order of id, from the file that open_clip installs (its import takes seconds)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    spec = find_spec("open_clip")
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("CLIP's vocabulary comes with open_clip_torch, which is not installed")
    path = Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
    try:
        lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: CLIP's vocabulary cannot be read: {error}") from None
    merges = [tuple(line.split()) for line in lines[1 : 1 + _CLIP_MERGES]]
    if len(merges) != _CLIP_MERGES or any(len(pair) != 2 for pair in merges):
        raise CheckpointError(f"{path}: does not hold the {_CLIP_MERGES} merges of CLIP")
    letters = list(_byte_letters().values())
    tokens = letters + [letter + _END for letter in letters] + ["".join(pair) for pair in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix=_END))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend, tokens


class CLIPTokenizer(Tokenizer):
    """CLIP's 49,408 ids (Radford et al. 2021), equal to `open_clip.tokenize` on ordinary text.

    Text is repaired by ftfy, freed of HTML entities, its spaces collapsed, lower-cased. Rows are padded with 0, which
    is also "!". Unlike the reference, "<end_of_text>" in a text is text, and the time taken is near-linear.
    """

    vocab_size = 49408
    pad_id, bos_id, eos_id = 0, 49406, 49407
    control = frozenset({49406, 49407})

    def __init__(self, context: int = 77):
        self.context = context
        self._backend, self._tokens = _clip_backend()
        self._bytes = {letter: byte for byte, letter in _byte_letters().items()}

    def _encode(self, text: str) -> list[int]:
        import regex

        words = regex.findall(_CLIP_WORDS, _clean(text).lower(), regex.IGNORECASE)
        return self._backend.encode(words, is_pretokenized=True, add_special_tokens=False).ids if words else []

    def decode(self, ids: Sequence[int], skip_control: bool = True) -> str:
        """Lower-cased text of ids, a space after each word; what follows the first eos is padding."""
        ids = [int(i) for i in ids]
        if skip_control and self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        return super().decode(ids, skip_control)

    def _decode(self, ids: list[int]) -> str:
        names = {self.bos_id: b"<start_of_text>", self.eos_id: b"<end_of_text>"}
        return b"".join(names.get(i) or self._piece(i) for i in ids).decode("utf-8", errors="replace").rstrip()

    def _piece(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        word = token.removesuffix(_END)
        return bytes(self._bytes[letter] for letter in word) + b" " * (word != token)

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "clip", "context": self.context})


def _clean(text: str) -> str:
    """Mojibake repaired, HTML entities read (twice, as captions from the web need), spaces collapsed."""
    import ftfy

    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


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
    ):
        """Raises CheckpointError naming the file when it is no model, or lacks an id that is asked for."""
        import sentencepiece

        self.path = Path(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=self.path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.path}: no SentencePiece model: {error}") from None
        self.vocab_size = self._model.vocab_size()
        self.pad_id = self._model.pad_id() if pad_id is None else pad_id
        if not 0 <= self.pad_id < self.vocab_size:
            raise CheckpointError(f"{self.path}: pad id {self.pad_id} is not in its vocabulary of {self.vocab_size}")
        self.eos_id = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.bos_id = self._model.bos_id() if add_bos else None
        if self.bos_id == -1:
            raise CheckpointError(f"{self.path}: add_bos, but the model has no bos id")
        self.canonical, self.context, self.pad_to_length = canonical, context, pad_to_length
        self.control = frozenset(i for i in range(self.vocab_size) if self._model.is_control(i))

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(canonicalize(text) if self.canonical else text)

    def _decode(self, ids: list[int]) -> str:
        text, plain = [], []
        for i in ids:  # the library drops control pieces, so they are written out here
            if i in self.control:
                text += [self._model.decode(plain), self._model.id_to_piece(i)]
                plain = []
            else:
                plain.append(i)
        return "".join([*text, self._model.decode(plain)])

    def save(self, folder: Path | str) -> None:
        """Copy the model file and write the record."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / self.path.name
        if self.path.resolve() != target.resolve():
            shutil.copyfile(self.path, target)
        settings = {key: getattr(self, key) for key in ("pad_id", "canonical", "context", "pad_to_length")}
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


def sentencepiece_from(folder: Path, settings: dict[str, Any]) -> SentencePieceTokenizer:
    """Build from a record; the file must lie in the folder itself, whatever the record says."""
    name = settings.pop("file")
    if Path(name).name != name or name in ("", ".", ".."):
        raise UsageError(f"{folder}: tokenizer file {name!r} is not a plain file name")
    return SentencePieceTokenizer(folder / name, **settings)
