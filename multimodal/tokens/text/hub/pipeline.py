"""Tokenizers from a `tokenizer.json` of the `tokenizers` library: BPE, Unigram, WordPiece."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from string import hexdigits
from typing import TYPE_CHECKING, Any

from multimodal.errors import CheckpointError, TextError, one_line
from multimodal.system.files import read_json
from multimodal.tokens.text.chunks import BackendChunkCache, encode_whole
from multimodal.tokens.text.hub.patterns import check_growth, check_pattern, check_time, no_panic, patterns_of
from multimodal.tokens.text.languages import languages_of, sentinels_of
from multimodal.tokens.text.pieces import pieces_of
from multimodal.tokens.text.tokenizer import MARK, RECORD, Piece, Tokenizer, checked, write_record, write_text

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
BYTES = {f"<0x{a}{b}>" for a in hexdigits for b in hexdigits}  # tokens of bytes
STRIPS = ("lstrip", "rstrip", "single_word")
IDS = ("pad_id", "bos_id", "eos_id", "mask_id", "unknown_id")


class HubTokenizer(Tokenizer):
    """Equal to the `tokenizers` library on ordinary text; unlike there, "</s>" in a text is text.

    Control tokens are kept here and removed from the pipeline. `batch` adds bos and eos."""

    def __init__(
        self, pipeline: dict[str, Any], control: dict[str, int], vocab_size: int, pad_id: int,
        bos_id: int | None = None, eos_id: int | None = None, mask_id: int | None = None,
        unknown_id: int | None = None, context: int | None = None, pad_to_length: bool = False, pair_ends: int = 1,
        end_ids: Sequence[int] = (), puts_end: bool = False, pair_segment: int = 1, mask_lstrip: bool = True,
        strips: Mapping[str, Sequence[str]] | None = None, named_bos_id: int | None = None,
    ):  # fmt: skip
        """`pipeline`: content of a `tokenizer.json`. `control`: names and ids of tokens that no text yields; ids below
        `vocab_size`, the rows of the model's embedding, without a token are control ids too. Raises CheckpointError for
        a vocabulary larger than the model or less than half of it, and a pipeline that still yields control ids.
        `strips`: flags of control tokens in chat templates, beside the pipeline's (Phi-3's take blanks behind them)."""
        self._tokens = _tokens(pipeline, control, vocab_size)
        nameless = {i for i, token in enumerate(self._tokens) if token is None}
        self.names, self.vocab_size, self.context = dict(control), vocab_size, context
        self.language_ids, self.sentinel_ids = languages_of(control), sentinels_of(control)
        self.pad_id, self.bos_id, self.eos_id, self.pad_to_length = pad_id, bos_id, eos_id, pad_to_length
        self.mask_id, self.unknown_id, self.named_bos_id, self.pair_ends = mask_id, unknown_id, named_bos_id, pair_ends
        self.end_ids, self.puts_end, self.pair_segment = tuple(end_ids), puts_end, pair_segment
        self.mask_lstrip, self.cleanable = mask_lstrip, pipeline["model"].get("type") in ("Unigram", "WordPiece")
        added = pipeline.get("added_tokens") or []
        told = {token["content"]: [flag for flag in STRIPS if token.get(flag)] for token in added}
        self.strips = {name: told.get(name) or (strips or {}).get(name) for name in control}
        self.strips = {name: flags for name, flags in self.strips.items() if flags}
        if wrong := [i for i in self.end_ids if i not in control.values()]:
            raise CheckpointError(f"end_ids: {wrong[0]} is not the id of a control token")
        for name in IDS:
            if (value := getattr(self, name)) is not None and not 0 <= value < vocab_size:
                raise CheckpointError(f"{name} {value} is outside the vocabulary of {vocab_size}")
        self.control = frozenset(control.values()) - {unknown_id} | nameless
        inert = without_control(pipeline, set(control))
        self._backend = _backend(inert)
        self._falls_back = '"ByteFallback"' in json.dumps(pipeline.get("decoder"))
        self._chunks = BackendChunkCache(self._backend) if splits_at_blanks(inert) else None
        with no_panic("the pipeline", CheckpointError):
            if next(patterns_of(pipeline), None) is not None:
                check_time(self._encode)
            self._check(control)
        for one in added:  # the library decodes these as its normalizer writes them: Llama's with the blank before
            if one.get("normalized") and one["id"] < vocab_size and one["id"] not in self.control:
                self._tokens[one["id"]] = self._backend.id_to_token(one["id"])

    def _check(self, control: dict[str, int]) -> None:
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i >= self.vocab_size or self._tokens[i] not in (token, token[1:-1]):
                raise CheckpointError(f"token {token[:40]!r} gets id {i}, which is another token's")
        for name in control:
            if ids := self.control & set(self._encode(f"{name} a{name}{name}a")):
                raise CheckpointError(f"the text {name!r} would give control id {min(ids)}")

    def _encode(self, text: str) -> list[int]:
        if self._chunks is not None:
            return self._chunks.encode(text)
        with no_panic(f"text {text[:40]!r}", TextError):
            return encode_whole(self._backend, text)

    @property
    def control_names(self) -> Mapping[str, int]:
        return self.names

    def encode_template(self, text: str) -> list[int]:
        """As the `tokenizers` library encodes it with control tokens. Raises TextError."""
        with no_panic(f"text {text[:40]!r}", TextError):
            encoding = self._template.encode(checked(text), add_special_tokens=False)
        # a control token comes with the blanks that it took
        names = [token.strip() if token.strip() in self.strips else token for token in encoding.tokens]
        return [self.names.get(name, i) for name, i in zip(names, encoding.ids, strict=True)]

    @cached_property
    def _template(self) -> "tokenizers.Tokenizer":
        """The pipeline with control tokens, which it finds before it drops `MARK`s and splits the rest."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        pipeline = json.loads(self._backend.to_str())
        drop, own = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}, pipeline["normalizer"]
        pipeline["normalizer"] = {"type": "Sequence", "normalizers": [drop, own]} if own else drop
        made = Backend.from_str(json.dumps(pipeline))
        for name in self.names:
            flags = dict.fromkeys(self.strips.get(name, ()), True)
            made.add_special_tokens([AddedToken(name, special=True, normalized=False, **flags)])
        return made

    def _decode(self, ids: list[int]) -> str:
        tokens = [self._tokens[i] or f"[{i}]" for i in ids]
        decoder = self._backend.decoder
        if not decoder:
            return " ".join(tokens)
        if self._falls_back and not BYTES.isdisjoint(tokens):
            tokens = _whole_characters(tokens)
        with no_panic(f"ids {ids[:5]}", TextError):
            return decoder.decode(tokens) if tokens else ""

    def pipeline(self) -> dict[str, Any]:
        return json.loads(self._backend.to_str())

    def pieces(self, text: str) -> list[Piece]:
        with no_panic(f"text {text[:40]!r}", TextError):
            return pieces_of(self._backend, checked(text), self.unknown_id)

    def joined(self, tokens: Sequence[str]) -> str:
        decoder = self._backend.decoder
        return decoder.decode(list(tokens)) if tokens and decoder else " ".join(tokens)

    def save(self, folder: Path | str) -> None:
        """Write the pipeline without control tokens, and the record with them."""
        write_text(Path(folder) / FILE, self._backend.to_str(pretty=True))
        settings = {name: getattr(self, name) for name in ("vocab_size", *IDS, "context")}
        optional = {"pad_to_length": True} if self.pad_to_length else {}
        optional |= {"pair_ends": self.pair_ends} if self.pair_ends != 1 else {}
        optional |= {"pair_segment": self.pair_segment} if self.pair_segment != 1 else {}
        optional |= {"end_ids": list(self.end_ids)} if self.end_ids else {}
        optional |= {"puts_end": True} if self.puts_end else {}
        optional |= {} if self.mask_lstrip else {"mask_lstrip": False}
        optional |= {"strips": self.strips} if self.strips else {}
        optional |= {} if self.named_bos_id is None else {"named_bos_id": self.named_bos_id}
        write_record(folder, {"kind": "hub", "control": self.names, **settings, **optional}, self)


def hub_from(folder: Path, settings: dict[str, Any]) -> HubTokenizer:
    """Build from a record and the pipeline beside it. Raises CheckpointError."""
    control = settings["control"]
    if not all(type(i) is int and i >= 0 for i in control.values()):
        raise CheckpointError(f"{folder / RECORD}: control must map names to ids (got {str(control)[:60]})")
    with naming_pipeline(folder / FILE):
        return HubTokenizer(read_json(folder / FILE), **settings)


@contextmanager
def naming_pipeline(path: Path) -> Iterator[None]:
    """Turn what a wrong pipeline raises inside the block into a CheckpointError that names `path`."""
    try:
        yield
    except (CheckpointError, TextError) as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{path}: {text}") from None
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"{path}: not a file of the tokenizers library ({error!r:.60})") from None


def vocabulary(pipeline: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield tokens and ids of the model and the added tokens. Raises CheckpointError for an invalid table."""
    vocab = (pipeline.get("model") or {}).get("vocab")
    if not isinstance(vocab, dict | list):
        raise CheckpointError("has no vocabulary")
    # Unigram: a list of [piece, score]
    pairs = [(piece[0], i) for i, piece in enumerate(vocab)] if isinstance(vocab, list) else list(vocab.items())
    for token, i in [*pairs, *((added["content"], added["id"]) for added in pipeline.get("added_tokens") or [])]:
        if not isinstance(token, str) or type(i) is not int or i < 0:
            raise CheckpointError(f"invalid token {str(token)[:40]!r} with id {i!r:.20}")
        yield token, i


def _whole_characters(tokens: list[str]) -> list[str]:
    """Tokens with U+FFFD in place of each byte of no whole character, as SentencePiece decodes them: the `tokenizers`
    library drops all characters of a run of bytes of which one is wrong, or not written yet."""
    made = list[str]()
    for named, group in groupby(tokens, BYTES.__contains__):
        run = list(group)
        text = bytes.fromhex("".join([token[3:5] for token in run])).decode(errors="surrogateescape") if named else ""
        if not text.isascii():
            made += chain.from_iterable(["\ufffd"] if "\udc80" <= c <= "\udcff" else _spelled(c) for c in text)
        else:
            made += run
    return made


def _spelled(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def _tokens(pipeline: dict[str, Any], control: dict[str, int], size: int) -> list[str | None]:
    """Token of each id; None for ids without one, such as padding rows of the embedding."""
    ids, tokens = {**dict(vocabulary(pipeline)), **control}, [None] * size
    hidden = {shadow(name) for name in control}
    for token, i in ids.items():
        if i >= size:
            raise CheckpointError(f"{token[:40]!r} has id {i}, the model has {size} tokens")
        if token not in hidden:
            tokens[i] = token
    # a release of transformers silently wrote a CLIP vocabulary of three tokens
    if 2 * (count := sum(token is not None for token in tokens)) < size or count <= len(control):
        raise CheckpointError(f"the vocabulary has {count} tokens, the model {size}")
    return tokens


def shadow(name: str) -> str:
    """Name of a control token in the model. No text yields it, since pipelines replace or split at blanks."""
    return f" {name} "


def without_control(pipeline: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Pipeline with these tokens renamed, and without bos and eos."""
    made = {key: value for key, value in pipeline.items() if key != "model"}
    model = copy.copy(pipeline["model"])
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {shadow(token) if token in names else token: i for token, i in vocab.items()}
        inside = names & vocab.keys()
    else:
        model["vocab"] = [[shadow(token) if token in names else token, score] for token, score in vocab]
        inside = names & {token for token, _ in vocab}
    if model.get("unk_token") in inside:
        model["unk_token"] = shadow(model["unk_token"])
    if "merges" in model:
        pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & inside]
    # the others stay, since later ids count on them; `encode_special_tokens` hides them
    added = [token for token in made.get("added_tokens") or [] if token["content"] not in inside]
    made["added_tokens"] = [token | {"special": True} if token["content"] in names else token for token in added]
    return made | {"model": model, "post_processor": None, "truncation": None, "padding": None}


def with_control(model: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The pipeline's model with the names that `without_control` took."""
    hidden = {shadow(name): name for name in names}
    vocab, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocab, dict):
        vocab = {hidden.get(token, token): i for token, i in vocab.items()}
    else:
        vocab = [[hidden.get(token, token), score] for token, score in vocab]
    return model | {"vocab": vocab} | ({"unk_token": hidden.get(unknown, unknown)} if unknown else {})


def splits_at_blanks(pipeline: dict[str, Any]) -> bool:
    """Return True for GPT-2's split into words, without added tokens that could span two of them."""
    split, model = pipeline.get("pre_tokenizer") or {}, pipeline["model"]
    return (
        split.get("type") == "ByteLevel" and not split.get("add_prefix_space", True) and split.get("use_regex", True)
        and pipeline.get("normalizer") is None and model.get("type") == "BPE" and not model.get("dropout")
        and all(token.get("special") for token in pipeline["added_tokens"])
    )  # fmt: skip


def _backend(pipeline: dict[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer as Backend
    from tokenizers import pre_tokenizers

    for pattern in patterns_of(pipeline):
        check_pattern(pattern)
    for name in ("normalizer", "decoder"):
        check_growth(pipeline.get(name))
    try:
        with no_panic("the pipeline", CheckpointError):
            backend = Backend.from_str(json.dumps(pipeline))
    except CheckpointError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"not a file of the tokenizers library ({one_line(error, 120)})") from None
    backend.encode_special_tokens = True
    model = pipeline["model"]
    if '"ByteLevel"' in json.dumps([pipeline.get("pre_tokenizer"), pipeline.get("normalizer")]):
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - model["vocab"].keys()
        if missing and model.get("type") == "BPE" and not model.get("unk_token"):  # they would be lost silently
            raise CheckpointError(f"the vocabulary lacks {len(missing)} of the 256 bytes, first {min(missing)!r}")
    return backend
