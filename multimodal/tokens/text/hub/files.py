"""Tokenizer of a Hugging Face folder, by the files that it holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import optional_json, read_json, shown
from multimodal.tokens.text.hub.added import added_tokens, class_name, completed
from multimodal.tokens.text.hub.pipeline import BYTES, FILE, HubTokenizer, naming_pipeline, vocabulary
from multimodal.tokens.text.languages import language_of
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer, extended_model
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer

SPECIAL = "special_tokens_map.json"
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
MORE = ("additional_special_tokens", "extra_special_tokens")
MASKS = ("<mask>", "[MASK]")  # the mask, if the files do not name it
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# not stated by folders with vocab.json and merges.txt: names of special tokens, and if texts get bos and eos
_ROBERTA = dict(zip(("bos", "eos", "unk", "pad", "mask"), ("<s>", "</s>", "<unk>", "<pad>", "<mask>"), strict=True))
_GPT2 = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
_QWEN2 = {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}
_OPT = {"bos": "</s>", "eos": "</s>", "unk": "</s>", "pad": "<pad>"}
BYTE_LEVEL = {"gpt2": (_GPT2, False), "roberta": (_ROBERTA, True), "bart": (_ROBERTA, True), "qwen2": (_QWEN2, False),
              "opt": (_OPT, False), "blenderbot": (_ROBERTA, False)}  # fmt: skip
# words of Qwen2 (Yang et al. 2024): contractions, letters, single digits, signs, line ends, blanks
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# classes of transformers that pad on the left
LEFT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "Siglip2Tokenizer", "CohereTokenizer",
        "XLNetTokenizer")  # fmt: skip
# models whose texts get a bos, which their SentencePiece files do not state
BOS = ("llama", "mistral", "mixtral", "phi3", "gemma", "gemma2", "gemma3_text")


def hub_tokenizer(
    folder: Path | None, config: dict[str, Any], size: int | None = None, context: int | None = None,
    lowercase: bool = False, named_end: bool = True, names: dict[str, str] | None = None,
) -> Tokenizer | None:  # fmt: skip
    """From `tokenizer.json`, `vocab.json` with `merges.txt`, or a SentencePiece model; None without them, and if their
    use by the model is unknown.

    `config`: the folder's `config.json`. `size`: rows of the model's embedding (default `vocab_size`); those without a
    token are control ids. `context`: default length of batches. `lowercase`: lower case before the folder's own
    normalizers. `batch` adds the bos and eos that the folder puts around a text, or else the eos that it names, unless
    `named_end` is False (an encoder's). `names`: further special tokens by what they are for. Raises CheckpointError
    for an unusable file, or one that does not fit."""
    if folder is None:
        return None
    names = names or {}
    size = config["vocab_size"] if size is None else size
    if (path := folder / FILE).is_file():
        return folder_tokenizer(path, read_json(path), names, config, size, context, lowercase, named_end)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(folder, config, size, context, lowercase, names)
    for path in (folder / name for name in PIECES):
        if path.is_file():
            if lowercase:
                raise CheckpointError(f"{path}: lower case before a SentencePiece model is not supported")
            return _from_pieces(path, config, size, context, names)
    return None


SINGLE_SPACES = [
    {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
    {"type": "Strip", "strip_left": True, "strip_right": True},
]
# big_vision's canonical form of SigLIP: lower case, no ASCII punctuation ("_" is a space), single spaces
CANONICAL = [
    {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
    {"type": "Replace", "pattern": {"Regex": r"[!-/:-@\[-`{-~]"}, "content": ""},
    {"type": "Lowercase"}, *SINGLE_SPACES,
]  # fmt: skip


def siglip2_tokenizer(folder: Path, size: int, context: int) -> HubTokenizer:
    """SigLIP 2's text (Tschannen et al. 2025, section 2.1): Gemma's vocabulary, lower case, eos, padded to the context
    with id 0. The model attends to its padding. Raises CheckpointError."""
    path = folder / FILE
    _check_sides(folder)
    pipeline = _cleaned(read_json(path), [{"type": "Lowercase"}])
    pipeline["post_processor"] = None
    tokenizer = _made(path, pipeline, {"eos": "<eos>"}, {}, size, context, pad_to_length=True)
    if (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) != (0, None, 1):
        ids = tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id
        raise CheckpointError(f"{path}: expected SigLIP 2's pad 0, no bos and eos 1 (got {ids})")
    return tokenizer


def open_clip_text(folder: Path, size: int, context: int, canonical: bool, strip_sep: bool) -> HubTokenizer | None:
    """OpenCLIP's HFTokenizer of a folder with `tokenizer.json`, padded to the context; None without the file.
    `canonical`: lower case without punctuation; `strip_sep`: padding in place of the token that ends a text (CLIPA).
    Raises CheckpointError."""
    path = folder / FILE
    if not path.is_file():
        return None
    _check_sides(folder)
    pipeline = _completed(path, read_json(path), {}, {})
    with naming_pipeline(path):
        pipeline = _cleaned(pipeline, CANONICAL if canonical else SINGLE_SPACES)
        if strip_sep:
            pad = next((token for token, i in vocabulary(pipeline) if i == 0), None)
            before, after = _around(pipeline.get("post_processor"))
            if pad is None or len(before) != 1 or len(after) != 1:
                raise CheckpointError("strip_sep_token needs a token before and one after a text, and one with id 0")
            pipeline["post_processor"] = {"type": "BertProcessing", "cls": [before[0], 0], "sep": [pad, 0]}
        return _made(path, pipeline, {}, {}, size, context, pad_to_length=True, named_end=False)


def _check_sides(folder: Path) -> None:
    """Raise CheckpointError for texts that transformers pads or cuts on the left."""
    record, pipeline = optional_json(folder / RECORD), optional_json(folder / FILE)
    kind, own = class_name(record, {}), (pipeline.get("padding") or {}).get("direction")
    padding = record.get("padding_side") or (own.lower() if isinstance(own, str) else None)
    if kind in LEFT and padding is None:
        raise CheckpointError(f"{folder / RECORD}: {kind} without padding_side pads on the left (expected right)")
    for name, side in (("padding_side", padding), ("truncation_side", record.get("truncation_side"))):
        if side not in ("right", None):
            raise CheckpointError(f"{folder / RECORD}: {name} {shown(side)} is not supported")


def _cleaned(pipeline: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """With these normalizers before its own."""
    own = pipeline.get("normalizer")
    held = own["normalizers"] if (own or {}).get("type") == "Sequence" else [own] * bool(own)
    first = [] if held[: len(steps)] == steps else [step for step in steps if len(steps) > 1 or step not in held]
    return pipeline | {"normalizer": {"type": "Sequence", "normalizers": [*first, *held]}}


def recognizer_tokenizer(folder: Path | None, size: int) -> HubTokenizer | None:
    """Text of a speech recognizer, whose `tokenizer.json` may list outputs from `size` on that are no text, such as the
    blank; None without that file. Raises CheckpointError."""
    path = folder / FILE if folder else None
    if path is None or not path.is_file():
        return None
    pipeline = read_json(path)
    with naming_pipeline(path):
        vocab, model = dict(vocabulary(pipeline)), pipeline["model"]
        added = [token for token in pipeline.get("added_tokens") or [] if token["id"] < size]
        if isinstance(model["vocab"], dict):
            model = model | {"vocab": {token: i for token, i in model["vocab"].items() if i < size}}
        pipeline |= {"added_tokens": added, "model": model, "post_processor": None}
        if len(vocab) < size:
            raise CheckpointError(f"has {len(vocab)} tokens, the model {size}")
    return _made(path, pipeline, {}, {}, size, None)


def _from_merges(
    folder: Path, config: dict[str, Any], size: int, context: int | None, lowercase: bool, more: dict[str, str]
) -> Tokenizer | None:
    """Byte-level BPE in the two files of GPT-2."""
    path = folder / "vocab.json"
    if (kind := config.get("model_type")) not in BYTE_LEVEL:
        return None
    names, ends = BYTE_LEVEL[kind]
    vocab, pairs = vocabulary_files(folder)
    record = optional_json(folder / RECORD)
    split, space = kind == "qwen2", bool(record.get("add_prefix_space", kind == "blenderbot"))
    bytes_ = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": not split}
    words = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    around = {"cls": ["<s>", 0], "sep": ["</s>", 0]}
    pipeline = {
        "version": "1.0", "normalizer": {"type": "NFC"} if split else None, "decoder": bytes_,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, bytes_]} if split else bytes_,
        "added_tokens": [],
        "post_processor": {"type": "RobertaProcessing", **around} if ends else None,
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs},
    }  # fmt: skip
    return folder_tokenizer(path, pipeline, names | more, config, size, context, lowercase)


def vocabulary_files(folder: Path, suffix: str = "") -> tuple[dict[str, int], list[list[str]]]:
    """Ids of `vocab.json` and pairs of `merges.txt`. `suffix`: of tokens that end a word. Raises CheckpointError."""
    path, merges = folder / "vocab.json", folder / "merges.txt"
    try:
        lines = merges.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{merges}: cannot be read as text ({error})") from None
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise CheckpointError(f"{merges}: expected a pair of tokens, got {' '.join(wrong[0])[:40]!r}")
    vocab = read_json(path)
    made = {"".join(pair) for pair in pairs}
    unmade = sum(len(token.removesuffix(suffix)) > 1 and token not in made for token in vocab)
    if unmade > len(vocab) // 10:  # control tokens are few; a truncated file would silently give other ids
        raise CheckpointError(f"{merges}: cannot make {unmade} of the {len(vocab)} tokens of {path.name}")
    return vocab, pairs


def _from_pieces(
    path: Path, config: dict[str, Any], size: int, context: int | None, names: dict[str, str]
) -> Tokenizer | None:  # fmt: skip
    record = optional_json(path.parent / RECORD)
    if "add_bos_token" not in record and config.get("model_type") not in BOS:
        return None
    ids = [config.get(f"{name}_token_id") for name in ("pad", "eos")]
    pad = next((i for i in ids if type(i) is int and i >= 0), 0)  # padding is masked: any id works
    add_bos, named = bool(record.get("add_bos_token", True)), names | dict(_named(path.parent, record))
    added, ends = added_tokens(path.parent, frozenset({*named.values(), *_more(record)})), _end_ids(path.parent, config)
    added = [token | {"special": token["special"] or token["id"] in ends} for token in added]
    roles = {role: named[role] for role in ("bos", "eos") if role in named}
    proto, plain = extended_model(path, added, roles, prefix=record.get("add_prefix_space") is not False)
    scheme = "first" if record.get("legacy") is False else "always"
    return SentencePieceTokenizer(path, pad, add_bos, context=context, vocab_size=size, proto=proto, added=plain,
                                  prepend_scheme=scheme, puts_end=bool(record.get("add_eos_token")))  # fmt: skip


def folder_tokenizer(
    path: Path, pipeline: dict[str, Any], names: dict[str, str], config: dict[str, Any], size: int,
    context: int | None, lowercase: bool = False, named_end: bool = True,
) -> HubTokenizer:  # fmt: skip
    """From the pipeline that the file `path` holds or stands for, with what the files beside it add. The others as in
    `hub_tokenizer`, and `names` of special tokens that the folder's files do not name. Raises CheckpointError."""
    pipeline = _completed(path, pipeline, names, config)
    return _made(path, pipeline, names, config, size, context, lowercase=lowercase, named_end=named_end)


def _completed(path: Path, pipeline: dict[str, Any], names: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    record = optional_json(path.parent / RECORD)
    special = {*(names | dict(_named(path.parent, record))).values(), *_more(record)}
    with naming_pipeline(path):
        return completed(pipeline, path.parent, config, frozenset(special))


def _made(
    path: Path, pipeline: dict[str, Any], names: dict[str, str], config: dict[str, Any], size: int,
    context: int | None, pad_to_length: bool = False, lowercase: bool = False, named_end: bool = True,
) -> HubTokenizer:  # fmt: skip
    """`names`: of special tokens that the folder's files do not name."""
    with naming_pipeline(path):
        pipeline = _within(_cleaned(pipeline, [{"type": "Lowercase"}]) if lowercase else pipeline, size)
        vocab = dict(vocabulary(pipeline))
        if not vocab:
            raise CheckpointError("the vocabulary is empty (0 tokens)")
        record = optional_json(path.parent / RECORD)
        named = names | dict(_named(path.parent, record))
        special = {token["content"] for token in pipeline.get("added_tokens") or [] if token.get("special")}
        special |= {*named.values(), *_more(record)}
        if pipeline["model"].get("byte_fallback"):  # some files list its bytes, which spell texts, as special
            special = {name for name in special if name not in BYTES}
        if "mask" not in named and len(masks := [token for token in MASKS if token in special]) == 1:
            named["mask"] = masks[0]
        control = {token: vocab[token] for token in sorted(special) if token in vocab}
        ids = _ids(pipeline, named, vocab, config, bool(record.get("add_bos_token")), named_end)
        # an eos that only config.json states is an ordinary token in the file
        control |= {token: i for token, i in vocab.items() if i == ids["eos_id"] and token not in control}
        added = {token["content"]: token["id"] for token in pipeline.get("added_tokens") or []}
        mask = [token for token in pipeline.get("added_tokens") or [] if token["content"] == named.get("mask")]
        # a letter that a stray id names stays one
        end_ids = [i for i in _end_ids(path.parent, config) if i != ids["eos_id"] and i in added.values()]
        control |= {token: i for token, i in added.items() if i in end_ids}
        ends = _between(pipeline.get("post_processor"))
        made = HubTokenizer(
            pipeline, control, size, context=context, pad_to_length=pad_to_length, pair_ends=ends,
            end_ids=end_ids, puts_end=bool(_around(pipeline.get("post_processor"))[1]),
            pair_segment=_pair_segment(pipeline.get("post_processor")),
            mask_lstrip=all(token.get("lstrip", True) for token in mask), **ids,
        )  # fmt: skip
        made.cuts_left = (pipeline.get("truncation") or {}).get("direction") == "Left"
        return made


def _within(pipeline: dict[str, Any], size: int) -> dict[str, Any]:
    """Without special tokens that the model has no row for, such as Gemma 3's image in a model of texts."""
    added = pipeline.get("added_tokens") or []
    kept = [token for token in added if not (token["special"] and type(token["id"]) is int and token["id"] >= size)]
    return pipeline if len(kept) == len(added) else pipeline | {"added_tokens": kept}


def _end_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """Ids that end a text, in generation_config.json and config.json."""
    told = [source.get("eos_token_id") for source in (optional_json(folder / "generation_config.json"), config)]
    ids = [i for value in told for i in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(i for i in ids if type(i) is int))


def _ids(
    pipeline: dict[str, Any], named: dict[str, str], vocab: dict[str, int], config: dict[str, Any], add_bos: bool,
    named_end: bool,
) -> dict[str, int | None]:  # fmt: skip
    def known(name: str) -> int | None:
        if name in named:
            return vocab.get(named[name])
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        return value if type(value) is int and value >= 0 else None

    sides = _around(pipeline.get("post_processor"))
    # a translator's language token is neither bos nor eos
    before, after = ([name for name in side if language_of(name) is None] for side in sides)
    if len(before) > 1 or len(after) > 1:
        raise CheckpointError(f"puts several tokens around a text ({', '.join([*before, *after])[:60]})")
    start = vocab[before[0]] if before else known("bos") if add_bos else None
    end = vocab[after[0]] if after else known("eos") if named_end else None
    pad, model = known("pad"), pipeline["model"]
    unknown = model.get("unk_id") if model.get("type") == "Unigram" else vocab.get(model.get("unk_token"))
    return {
        "bos_id": start, "named_bos_id": vocab.get(named.get("bos")) if start is None else None, "eos_id": end,
        "mask_id": vocab.get(named.get("mask")),
        "pad_id": next((i for i in (pad, end) if i is not None), 0),  # padding is masked: any id works
        "unknown_id": None if unknown in (start, end, pad) else unknown,
    }  # fmt: skip


def _around(post: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """Names of the tokens that a post-processor puts before and after a text."""
    kind = (post or {}).get("type")
    if kind == "Sequence":
        parts = [_around(part) for part in post["processors"]]
        return [name for part in parts for name in part[0]], [name for part in parts for name in part[1]]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [post["cls"][0]], [post["sep"][0]]
    if kind == "TemplateProcessing":
        items = [next(iter(item.items())) for item in post["single"]]
        at = [key for key, _ in items].index("Sequence")
        tokens = [post["special_tokens"][item["id"]]["tokens"] for key, item in items if key != "Sequence"]
        return [t for part in tokens[:at] for t in part], [t for part in tokens[at:] for t in part]
    if kind not in (None, "ByteLevel"):
        raise CheckpointError(f"post_processor {str(kind)[:40]!r} is not supported")
    return [], []


def _between(post: dict[str, Any] | None) -> int:
    """Number of tokens that a post-processor puts between the texts of a pair; 1 if it does not say."""
    kind = (post or {}).get("type")
    if kind == "Sequence":
        return max((_between(part) for part in post["processors"]), default=1)
    if kind == "RobertaProcessing":
        return 2
    if kind != "TemplateProcessing":
        return 1
    kinds = [next(iter(item)) for item in post["pair"]]
    first, *_, last = [number for number, name in enumerate(kinds) if name == "Sequence"] or [0, 2]
    return max(1, last - first - 1)


def _pair_segment(post: dict[str, Any] | None) -> int:
    """Segment that a post-processor gives the second text of a pair; 1 if it does not say."""
    kind = (post or {}).get("type")
    if kind == "Sequence":
        return min((_pair_segment(part) for part in post["processors"]), default=1)
    if kind == "TemplateProcessing":
        texts = [item["Sequence"] for item in post["pair"] if "Sequence" in item]
        return int(texts[-1]["type_id"] != 0) if texts else 1
    return int(kind != "RobertaProcessing")


def _named(folder: Path, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield `bos`, `eos`, … and their tokens in the folder's two files."""
    table = optional_json(folder / SPECIAL)
    for name in NAMES:
        for source in (table, record):
            token = source.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token:
                yield name, token


def _more(record: dict[str, Any]) -> Iterator[str]:
    """Yield further special tokens, stored as a list or a table."""
    for key in MORE:
        tokens = record.get(key) or []
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            yield token["content"] if isinstance(token, dict) else token
