"""CLIP's tokenizer: equal to the reference on ordinary text, and fast, since words are cached."""

import gzip
import html
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multimodal.errors import CheckpointError
from multimodal.system.assets import open_clip_file
from multimodal.system.files import read_json
from multimodal.tokens.text.bytepair import byte_letters, byte_level
from multimodal.tokens.text.chunks import ChunkCache
from multimodal.tokens.text.hub.added import added_tokens
from multimodal.tokens.text.hub.files import folder_tokenizer, vocabulary_files
from multimodal.tokens.text.hub.pipeline import FILE, naming_pipeline, vocabulary
from multimodal.tokens.text.tokenizer import Tokenizer, write_record

if TYPE_CHECKING:
    import tokenizers

_MERGE_COUNT = 49152 - 256 - 2  # the file holds more lines than CLIP was trained with
# the words of CLIP, without the two control tokens that the reference's pattern lets a user spell
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
_CONTROL = {"<|startoftext|>": 49406, "<|endoftext|>": 49407}  # as transformers names them
_END = "</w>"  # marks the last piece of a word
# what neither ftfy nor html.unescape changes but for its blanks: no "&", no control characters
_PLAIN = re.compile(r"[\t\n\f\r !-%'-~]*")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")


@lru_cache(maxsize=1)
def _vocabulary() -> tuple["tokenizers.models.BPE", list[str]]:
    """The BPE model and its tokens by id."""
    from tokenizers import models

    merges, letters = _merges(), list(byte_letters().values())
    tokens = letters + [letter + _END for letter in letters] + ["".join(pair) for pair in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocab=vocab, merges=merges, end_of_word_suffix=_END), tokens


def _merges() -> list[tuple[str, str]]:
    """Merges of the file that open_clip installs."""
    path = open_clip_file("bpe_simple_vocab_16e6.txt.gz")
    try:
        lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}: CLIP's vocabulary cannot be read: {error}") from None
    merges = [tuple(line.split()) for line in lines[1 : 1 + _MERGE_COUNT]]
    if len(merges) != _MERGE_COUNT or any(len(pair) != 2 for pair in merges):
        raise CheckpointError(f"{path}: does not hold the {_MERGE_COUNT} merges of CLIP")
    return merges


class _CLIPChunkCache(ChunkCache):
    """Cache of the text between two blanks; no word of the pattern contains one."""

    def __init__(self, model: "tokenizers.models.BPE"):
        import regex

        self._words, self._letters = regex.compile(_WORDS, regex.IGNORECASE), byte_letters()
        self._model = model

    def one(self, chunk: str) -> list[int]:
        words = ("".join(map(self._letters.__getitem__, word.encode())) for word in self._words.findall(chunk))
        return [token.id for word in words for token in self._model.tokenize(word)]


class CLIPTokenizer(Tokenizer):
    """CLIP's 49,408 ids (Radford et al. 2021), equal to `open_clip.tokenize` on ordinary text.

    Text is repaired by ftfy, HTML entities are decoded, spaces collapsed, letters lower-cased. Rows are padded with 0,
    which is also "!". Unlike in the reference, "<end_of_text>" in a text is text, and the time is near-linear.
    """

    vocab_size = 49408
    pad_id, bos_id, eos_id = 0, 49406, 49407
    control = frozenset({49406, 49407})

    def __init__(self, context: int = 77):
        self.context = context
        model, self._tokens = _vocabulary()
        self._chunks = _CLIPChunkCache(model)
        self._bytes = {letter: byte for byte, letter in byte_letters().items()}

    def _encode(self, text: str) -> list[int]:
        text = text if _PLAIN.fullmatch(text) else _clean(text)
        return list(chain.from_iterable(map(self._chunks.__getitem__, text.lower().split())))

    def spelled(self, ids: Sequence[int], skip_control: bool = True) -> str:
        """Lower-cased text with a space after each word, up to the first eos."""
        ids = [int(i) for i in ids]
        if skip_control and self.eos_id in ids:
            ids = ids[: ids.index(self.eos_id)]
        return super().spelled(ids, skip_control)

    def _decode(self, ids: list[int]) -> str:
        names = {self.bos_id: b"<start_of_text>", self.eos_id: b"<end_of_text>"}
        return b"".join(names.get(i) or self._piece(i) for i in ids).decode("utf-8", errors="replace").rstrip()

    def _piece(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        word = token.removesuffix(_END)
        return bytes(self._bytes[letter] for letter in word) + b" " * (word != token)

    def pipeline(self) -> dict[str, Any]:
        """Without the repair of text and HTML entities, as transformers' CLIPTokenizerFast."""
        return _pipeline({token: i for i, token in enumerate(self._tokens)}, list(map(list, _merges())))

    def save(self, folder: Path | str) -> None:
        write_record(folder, {"kind": "clip", "context": self.context})


def clip_tokenizer(folder: Path, size: int, context: int) -> Tokenizer | None:
    """From the files of transformers' CLIPTokenizer, for a model of `size` rows: OpenAI's vocabulary, or the folder's
    own with its added tokens, whose texts are not repaired. Without files OpenAI's if the model has its size, else
    None. Raises CheckpointError."""
    path = folder / FILE
    if path.is_file():
        file = read_json(path)
        with naming_pipeline(path):
            vocab, added = dict(vocabulary({"model": file["model"]})), file.get("added_tokens") or []
            merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in file["model"]["merges"]]
            ids = dict(vocabulary(file))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        path, added = folder / "vocab.json", []
        vocab, merges = vocabulary_files(folder, _END)
        ids = vocab
    else:
        return CLIPTokenizer(context) if size == CLIPTokenizer.vocab_size else None
    if len(vocab) > size:
        raise CheckpointError(f"{path}: has {len(vocab)} tokens, the model embeds {size}")
    openai = {token: i for i, token in enumerate(_vocabulary()[1])} | _CONTROL
    own = {token["content"]: token["id"] for token in added_tokens(folder)} | ids
    if own == openai and list(map(tuple, merges)) == _merges():
        return CLIPTokenizer(context)
    with naming_pipeline(path):
        begin, end = ([token, own[token]] for token in _CONTROL)
        pipeline = _pipeline(vocab, merges)
        words = {"type": "Replace", "pattern": {"String": _END}, "content": " "}
        last = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
        pipeline |= {"added_tokens": added, "post_processor": {"type": "RobertaProcessing", "cls": begin, "sep": end},
                     "decoder": {"type": "Sequence", "decoders": [pipeline["decoder"], words, last]},
                     "model": pipeline["model"] | {"unk_token": end[0]}}  # fmt: skip
    roles = {"bos": begin[0], **dict.fromkeys(("eos", "unk", "pad"), end[0])}
    return folder_tokenizer(path, pipeline, roles, {}, size, context)


def _pipeline(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    """CLIP's split into words, without the repair of texts."""
    made = byte_level(vocab, merges)
    blanks = {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}
    split = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Removed", "invert": True}
    whole = made["pre_tokenizer"] | {"use_regex": False}
    return made | {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, blanks, {"type": "Lowercase"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, whole]},
        "model": made["model"] | {"end_of_word_suffix": _END},
    }  # fmt: skip


def _clean(text: str) -> str:
    """Repair mojibake and decode HTML entities (twice, as in the reference)."""
    return html.unescape(html.unescape(_repaired(text)))


def _repaired(text: str) -> str:
    """Repair by ftfy, each distinct line once. After a "<" ftfy treats later lines differently, so then as a whole."""
    import ftfy

    if "<" in text:
        return ftfy.fix_text(text)
    lines = _LINES.findall(text)
    fixed = {line: line if _PLAIN.fullmatch(line) else ftfy.fix_text(line) for line in set(lines)}
    return "".join(map(fixed.__getitem__, lines))
