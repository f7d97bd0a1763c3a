"""`tokenizer_from`: the tokenizer of a checkpoint folder, or a vocabulary by name."""

from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.assets import shipped
from multimodal.system.files import path_of, read_json
from multimodal.tokens.text.bytepair import bytepair_from
from multimodal.tokens.text.characters import CharacterTokenizer
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.hub.pipeline import hub_from
from multimodal.tokens.text.hub.recognizers import LetterTokenizer, aggregate_from
from multimodal.tokens.text.sentencepiece import ByteTokenizer, sentencepiece_from
from multimodal.tokens.text.t5 import ByT5Text, t5_from
from multimodal.tokens.text.tiktokens import GPT2Tokenizer, WhisperTokenizer
from multimodal.tokens.text.tokenizer import FLAGS, RECORD, Tokenizer, require_keys
from multimodal.tokens.text.translation import pieces_from
from multimodal.tokens.text.whisper_small import whisper_small_from
from multimodal.tokens.text.wordpiece import wordpiece_from

_KEYS: dict[str, dict[str, Any]] = {
    "bpe": {"vocab_size": int, "lowercase": bool},
    "clip": {"context": int},
    "whisper": {"multilingual": bool, "languages": int},
    "whisper-small": {"languages": list[str], "timestamps": int},
    "gpt2": {},
    "bytes": {},
    "byt5": {"sentinels": int},
    "t5": {"sentinels": int, "vocab_size": int},
    "pieces": {"two_models": bool, "languages": dict[str, int], "vocab_size": int, "language_in_source": bool},
    "characters": {"characters": str},
    "letters": {"tokens": list[str], "space": str, "control": list[str], "unknown": str | None},
    "sentencepiece": {
        "file": str, "context": int | None, **dict.fromkeys(("pad_id", "vocab_size"), int),
        **dict.fromkeys(("add_bos", "canonical", "pad_to_length"), bool),
    },
    "aggregate": {"files": list[str], "vocab_size": int},
    "hub": {
        "control": dict[str, int], "vocab_size": int, "pad_id": int,
        **dict.fromkeys(("bos_id", "eos_id", "mask_id", "unknown_id", "context"), int | None),
    },
    "wordpiece": {
        **dict.fromkeys(("vocab_size", "bos_id", "eos_id"), int), "context": int | None, "lowercase": bool,
        "strip_accents": bool | None, "split_chinese": bool,
    },
}  # fmt: skip
_OPTIONAL: dict[str, dict[str, Any]] = {
    "bpe": {"languages": list[str]},
    "pieces": {"added": dict[str, int], "two_tables": bool},
    "sentencepiece": {"added": list[str], "prepend_scheme": str, "puts_end": bool},
    "t5": {"context": int},
    "byt5": {"context": int},
    "letters": {"clean": bool},
    "hub": {
        **dict.fromkeys(("pair_ends", "pair_segment", "named_bos_id"), int),
        "end_ids": list[int],
        "strips": dict[str, list[str]],
        **dict.fromkeys(("pad_to_length", "puts_end", "mask_lstrip"), bool),
    },
}
MOST_CONTEXT = 1 << 24  # tokens
_NAMED = {
    "clip": CLIPTokenizer,
    "gpt2": GPT2Tokenizer,
    "bytes": ByteTokenizer,
    "whisper": lambda: WhisperTokenizer(multilingual=True),
    "whisper-en": lambda: WhisperTokenizer(multilingual=False),
    "whisper-v3": lambda: WhisperTokenizer(multilingual=True, languages=100),
}
_OTHERS = {"whisper": WhisperTokenizer, "characters": CharacterTokenizer, "byt5": ByT5Text, "letters": LetterTokenizer}
_WITH_FILES = {
    "sentencepiece": sentencepiece_from, "hub": hub_from, "wordpiece": wordpiece_from, "t5": t5_from,
    "whisper-small": whisper_small_from, "pieces": pieces_from, "bpe": bytepair_from,
    "aggregate": aggregate_from,
}  # fmt: skip


def tokenizer_from(source: Path | str) -> Tokenizer:
    """Tokenizer of a checkpoint folder (by its `tokenizer_config.json`) or shipped model, or a vocabulary by name.

    The strings clip, gpt2, bytes, whisper, whisper-en and whisper-v3 are names; write "./clip" for a folder. Raises
    UsageError for anything else, CheckpointError for a damaged record."""
    if isinstance(source, str) and source in _NAMED:
        return _NAMED[source]()
    folder = path_of(source, UsageError, "tokenizer")
    if not folder.is_dir():
        if (own := shipped().get(str(source))) is None:
            raise UsageError(f"{source}: neither a folder, a shipped model nor a vocabulary ({', '.join(_NAMED)})")
        folder = own
    record = read_json(folder / RECORD)
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise CheckpointError(f"{folder / RECORD}: kind must be one of {', '.join(_KEYS)} (got {kind!r})")
    flags = {flag: record.pop(flag) for flag in FLAGS if record.get(flag) is True}
    more = {key: form for key, form in _OPTIONAL.get(kind, {}).items() if key in record}
    require_keys(record, {"kind": str, **_KEYS[kind], **more}, folder)
    if (context := record.get("context")) is not None and not 0 < context <= MOST_CONTEXT:
        raise CheckpointError(f"{folder / RECORD}: context: expected a number from 1 to {MOST_CONTEXT} ({context})")
    if not 0 <= record.get("vocab_size", 1) <= MOST_CONTEXT or not 0 <= record.get("sentinels", 1) <= 1 << 20:
        raise CheckpointError(f"{folder / RECORD}: vocab_size or sentinels: too large")
    settings = {key: value for key, value in record.items() if key != "kind"}
    try:
        own = _WITH_FILES.get(kind)
        made: Tokenizer = {**_NAMED, **_OTHERS}[kind](**settings) if own is None else own(folder, settings)
    except UsageError as error:
        raise CheckpointError(f"{folder / RECORD}: {error}") from None
    vars(made).update(flags)
    return made
