"""Translation direction: language tokens for the encoder and the decoder."""

import difflib
from collections.abc import Mapping

from multimodal.errors import UsageError
from multimodal.tokens.text.languages import LANGUAGES, NLLB, language_code
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint

FEW = 8  # languages listed in full
# ISO 639-3; Marian has `cmn` for Chinese
THREE_LETTERS = {"cmn": "zh"} | {code.partition("_")[0]: known for known, code in NLLB.items()}


def direction(checkpoint: Checkpoint, source: str | None, target: str | None) -> tuple[list[int], list[int]]:
    """Token ids before a source text, and those after the decoder's start token: M2M100 has the source language in the
    former and the target language in the latter; a multilingual Marian has the target language in the former. Other
    models state their one direction in the card ("translation"). Raises UsageError for a language that is unknown,
    missing or not the model's."""
    tokenizer, card = checkpoint.tokenizer, checkpoint.card.get("translation")
    if not tokenizer.language_ids:
        _fits(checkpoint.source, card, source, target)
        return [], []
    if tokenizer.language_in_source:
        if isinstance(card, Mapping) and card.get("from"):
            _fits(checkpoint.source, {"from": card["from"]}, source, None)
        return [language_id(tokenizer, target, "target")], []
    return [language_id(tokenizer, source, "source")], [language_id(tokenizer, target, "target")]


def language_id(tokenizer: Tokenizer, asked: str | None, name: str) -> int:
    """The token id of a language, given as the model's code, as Whisper's ("en" for NLLB's "eng_Latn", mBART's "en_XX"
    and Marian's "eng"), as ISO 639-3's or as an English name. Raises UsageError with close matches."""
    ids = tokenizer.language_ids
    if asked is None:
        raise UsageError(f"is required, the model knows {_some(list(ids))}", argument=name)
    by_code = {code.lower(): i for code, i in ids.items()}
    given, known = asked.strip().lower(), short_code(asked)
    nllb = NLLB.get(known, "").lower()
    for code in (given, known, nllb if given not in THREE_LETTERS else "", nllb.partition("_")[0]):
        if code in by_code:
            return by_code[code]
    if len(regions := [i for code, i in ids.items() if code.partition("_")[0] in (given, known)]) == 1:
        return regions[0]
    raise UsageError(f"{asked[:40]!r}: unknown to the model ({_near(asked, list(ids))})", argument=name)


def task_prefix(checkpoint: Checkpoint, source: str | None, target: str | None) -> str | None:
    """Words before a text that ask for this translation, of a model that states some (T5); None: it states none. Raises
    UsageError for another direction."""
    if not (prefixes := checkpoint.card.get("translations")):
        return None
    for name, asked in (("source", source), ("target", target)):
        if asked is None:
            raise UsageError(f"is required, the model knows {', '.join(prefixes)}", argument=name)
    direction = f"{short_code(source)}-{short_code(target)}"
    if direction not in prefixes:
        raise UsageError(f"{target[:40]!r}: the model does not translate {direction} ({', '.join(prefixes)})",
                         argument="target")  # fmt: skip
    return prefixes[direction]


def _fits(model: str, card: object, source: str | None, target: str | None) -> None:
    if not isinstance(card, Mapping):
        raise UsageError(f"model {model}: direction unknown: neither vocabulary nor card names languages")
    for key, name, asked in (("from", "source", source), ("to", "target", target)):
        if asked is None:
            continue
        if not isinstance(own := card.get(key), str):
            raise UsageError(f"{asked[:40]!r}: the model does not state its one direction; omit it", argument=name)
        if short_code(asked) != short_code(own):
            raise UsageError(f"{asked[:40]!r}: the model translates {key} {own!r} only", argument=name)


def short_code(language: str) -> str:
    """Whisper's code of a language if it has one, else the input in lower case."""
    name = language.strip().lower()
    try:
        return language_code(THREE_LETTERS.get(name, name))
    except UsageError:
        return name


def is_language(name: str) -> bool:
    """Return True for a code or English name of a language that Whisper knows."""
    return short_code(name) in LANGUAGES


def _near(asked: str, codes: list[str]) -> str:
    """Languages of a model with a similar code or English name."""
    names = {name: code for code in codes for name in (code.lower(), LANGUAGES.get(code)) if name}
    near = difflib.get_close_matches(asked.strip().lower(), names, n=5, cutoff=0.5)
    matches = list(dict.fromkeys(names[name] for name in near))
    if not matches or len(codes) <= FEW:
        return f"known: {_some(codes)}"
    shown = ", ".join(f"{code} {LANGUAGES[code].title()}" if code in LANGUAGES else code for code in matches)
    return f"near: {shown}; it knows {len(codes)}"


def _some(codes: list[str]) -> str:
    shown = ", ".join(codes[:FEW])
    return shown if len(codes) <= FEW else f"{len(codes)} languages: {shown}, …"
