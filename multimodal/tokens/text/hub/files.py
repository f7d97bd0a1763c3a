"""The tokenizer of a folder in the layout of Hugging Face, by the files that it holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.system.files import read_json
from multimodal.tokens.text.hub.pipeline import FILE, HubTokenizer, naming, vocabulary
from multimodal.tokens.text.languages import language_of
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer

SPECIAL = "special_tokens_map.json"
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
MORE = ("additional_special_tokens", "extra_special_tokens")
MASKS = ("<mask>", "[MASK]")  # the mask of files that do not say which of their special tokens it is
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# what folders with vocab.json and merges.txt leave to the code that reads them: names, and whether texts get ends
_ROBERTA = dict(zip(("bos", "eos", "unk", "pad", "mask"), ("<s>", "</s>", "<unk>", "<pad>", "<mask>"), strict=True))
_GPT2 = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
BYTE_LEVEL = {"gpt2": (_GPT2, False), "roberta": (_ROBERTA, True), "bart": (_ROBERTA, True)}
BOS = ("llama", "mistral")  # whose SentencePiece files leave it to the code that texts get a bos


def hub_tokenizer(
    folder: Path | None, config: dict[str, Any], size: int | None = None, context: int | None = None
) -> Tokenizer | None:
    """From `tokenizer.json`, or else `vocab.json` with `merges.txt`, or else a SentencePiece model; None where there
    is none of them, or it is not known how the model uses it.

    `config`: the folder's `config.json`. `size`: rows of the model's embedding, by default its `vocab_size`; those
    without a token are control ids. `context`: what a batch is cut to. The bos and eos of `batch` are those that the
    folder puts around a text; where it puts no end, the eos that it names. Raises CheckpointError naming the file, also
    for a vocabulary that does not go with the model."""
    if folder is None:
        return None
    size = config["vocab_size"] if size is None else size
    if (path := folder / FILE).is_file():
        return _made(path, read_json(path), {}, config, size, context)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(folder, config, size, context)
    for path in (folder / name for name in PIECES):
        if path.is_file():
            return _from_pieces(path, config, size, context)
    return None


def _from_merges(folder: Path, config: dict[str, Any], size: int, context: int | None) -> Tokenizer | None:
    """Byte-level BPE in GPT-2's two files."""
    path = folder / "vocab.json"
    if (kind := config.get("model_type")) not in BYTE_LEVEL:
        return None
    names, ends = BYTE_LEVEL[kind]
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'merges.txt'}: cannot be read as text ({error})") from None
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if wrong := [pair for pair in pairs if len(pair) != 2]:
        raise CheckpointError(f"{folder / 'merges.txt'}: {' '.join(wrong[0])[:40]!r} is no pair of tokens")
    vocab, more = read_json(path), folder / "added_tokens.json"
    made = {"".join(pair) for pair in pairs}
    unmade = sum(len(token) > 1 and token not in made for token in vocab)
    if unmade > len(vocab) // 10:  # control tokens are few; a file that was cut would give other ids without a word
        raise CheckpointError(
            f"{folder / 'merges.txt'}: makes {unmade} of the {len(vocab)} tokens of {path.name} never"
        )
    added = sorted((read_json(more) if more.is_file() else {}).items(), key=lambda pair: str(pair[1]))
    prefix = _record(folder).get("add_prefix_space", False)
    bytes_ = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": True}
    around = {"cls": ["<s>", 0], "sep": ["</s>", 0]}
    pipeline = {
        "version": "1.0", "normalizer": None, "pre_tokenizer": bytes_, "decoder": bytes_,
        "added_tokens": [_added(token, i) for token, i in added],
        "post_processor": {"type": "RobertaProcessing", **around} if ends else None,
        "model": {"type": "BPE", "vocab": vocab, "merges": pairs},
    }  # fmt: skip
    return _made(path, pipeline, names, config, size, context)


def _added(token: str, i: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": token, "special": True, **flags}


def _from_pieces(path: Path, config: dict[str, Any], size: int, context: int | None) -> Tokenizer | None:
    from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer

    record = _record(path.parent)
    if "add_bos_token" not in record and config.get("model_type") not in BOS:
        return None
    told = [config.get(f"{name}_token_id") for name in ("pad", "eos")]
    pad = next((i for i in told if type(i) is int and i >= 0), 0)  # padding is masked: any id will do
    add_bos = bool(record.get("add_bos_token", True))
    return SentencePieceTokenizer(path, pad, add_bos, context=context, vocab_size=size)


def _made(
    path: Path, pipeline: dict[str, Any], names: dict[str, str], config: dict[str, Any], size: int,
    context: int | None,
) -> HubTokenizer:  # fmt: skip
    """`names`: of special tokens, where the folder's files give none."""
    try:
        held = dict(vocabulary(pipeline))
        if not held:
            raise CheckpointError("the vocabulary is empty (0 tokens)")
        record = _record(path.parent)
        named = names | dict(_named(path.parent, record))
        special = {token["content"] for token in pipeline.get("added_tokens") or [] if token.get("special")}
        special |= {*named.values(), *_more(record)}
        if "mask" not in named and len(found := [token for token in MASKS if token in special]) == 1:
            named["mask"] = found[0]
        control = {token: held[token] for token in sorted(special) if token in held}
        ids = _ids(pipeline, named, held, config, bool(record.get("add_bos_token")))
        # the id of an end that only config.json tells is an ordinary token's to the file
        control |= {token: i for token, i in held.items() if i == ids["eos_id"] and token not in control}
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"{path}: is no tokenizer of the tokenizers library ({error!r:.60})") from None
    return naming(path, pipeline, control=control, vocab_size=size, context=context, **ids)


def _ids(
    pipeline: dict[str, Any], named: dict[str, str], held: dict[str, int], config: dict[str, Any], add_bos: bool
) -> dict[str, int | None]:
    def known(name: str) -> int | None:
        if name in named:
            return held.get(named[name])
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        return value if type(value) is int and value >= 0 else None

    sides = _around(pipeline.get("post_processor"))
    # a translator's language is no begin or end of all texts
    before, after = ([name for name in side if language_of(name) is None] for side in sides)
    if len(before) > 1 or len(after) > 1:
        raise CheckpointError(f"puts several tokens around a text ({', '.join([*before, *after])[:60]})")
    start = held[before[0]] if before else known("bos") if add_bos else None
    end = held[after[0]] if after else known("eos")
    pad, model = known("pad"), pipeline["model"]
    unknown = model.get("unk_id") if model.get("type") == "Unigram" else held.get(model.get("unk_token"))
    return {
        "bos_id": start, "eos_id": end, "mask_id": held.get(named.get("mask")),
        "pad_id": next((i for i in (pad, end) if i is not None), 0),  # padding is masked: any id will do
        "unknown_id": None if unknown in (start, end, pad) else unknown,
    }  # fmt: skip


def _around(post: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """Names of the tokens that a post-processor puts before and after one text."""
    kind = (post or {}).get("type")
    if kind == "Sequence":
        parts = [_around(part) for part in post["processors"]]
        return [name for part in parts for name in part[0]], [name for part in parts for name in part[1]]
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [post["cls"][0]], [post["sep"][0]]
    if kind == "TemplateProcessing":
        items = [next(iter(item.items())) for item in post["single"]]
        at = [key for key, _ in items].index("Sequence")
        tokens = [
            [t for name in (v["id"],) for t in post["special_tokens"][name]["tokens"]]
            for k, v in items
            if k != "Sequence"
        ]
        return [t for part in tokens[:at] for t in part], [t for part in tokens[at:] for t in part]
    if kind not in (None, "ByteLevel"):
        raise CheckpointError(f"post_processor {str(kind)[:40]!r} is not known")
    return [], []


def _record(folder: Path) -> dict[str, Any]:
    return read_json(folder / RECORD) if (folder / RECORD).is_file() else {}


def _named(folder: Path, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """`bos`, `eos`, … and the token of each, as the folder's two files have them."""
    table = read_json(folder / SPECIAL) if (folder / SPECIAL).is_file() else {}
    for name in NAMES:
        for source in (table, record):
            token = source.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token:
                yield name, token


def _more(record: dict[str, Any]) -> Iterator[str]:
    """Further special tokens, of which the old files have a list and new ones a list or a table."""
    for key in MORE:
        found = record.get(key) or []
        for token in found.values() if isinstance(found, dict) else found:
            yield token["content"] if isinstance(token, dict) else token
