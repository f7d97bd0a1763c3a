"""Which way a translator is asked to translate, and how that is told to it."""

import difflib
from collections.abc import Mapping

from multimodal.errors import UsageError
from multimodal.tokens.text.languages import LANGUAGES, language_code
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint

FEW = 8  # languages that are listed in full


def direction(checkpoint: Checkpoint, source: str | None, target: str | None) -> tuple[list[int], list[int]]:
    """The ids before a source's text, and those that an answer begins with after the start id: M2M100 has the source's
    language there and the target's here, Marian the target's there where it knows several. A card's "translation" has
    the one direction of other models. Raises UsageError for a language that is unknown, missing or not that one."""
    tokenizer, card = checkpoint.tokenizer, checkpoint.card.get("translation")
    if not tokenizer.language_ids:
        _fits(checkpoint.source, card, source, target)
        return [], []
    if tokenizer.language_in_source:
        if isinstance(card, Mapping) and card.get("from"):
            _fits(checkpoint.source, {"from": card["from"]}, source, None)
        return [language_id(tokenizer, target, "to")], []
    return [language_id(tokenizer, source, "from")], [language_id(tokenizer, target, "to")]


def language_id(tokenizer: Tokenizer, asked: str | None, flag: str) -> int:
    """The id of a language's token, given by the model's code or by an English name. Raises UsageError with the near
    ones."""
    ids = tokenizer.language_ids
    if asked is None:
        raise UsageError(f"--{flag}: is needed, the model knows {_some(list(ids))}")
    by_code = {code.lower(): i for code, i in ids.items()}
    for code in (asked.strip().lower(), _code(asked)):
        if code in by_code:
            return by_code[code]
    raise UsageError(f"--{flag} {asked[:40]!r}: the model does not know this language ({_near(asked, list(ids))})")


def _fits(model: str, card: object, source: str | None, target: str | None) -> None:
    if not isinstance(card, Mapping):
        raise UsageError(
            f"model {model}: does not say what it translates: its vocabulary has no languages, its card no translation"
        )
    for flag, asked in (("from", source), ("to", target)):
        told = card.get(flag)
        if asked is not None and not isinstance(told, str):
            raise UsageError(f"--{flag} {asked[:40]!r}: the model's one direction is not stated; leave it out")
        if asked is not None and _code(asked) != _code(told):
            raise UsageError(f"--{flag} {asked[:40]!r}: the model translates {flag} {told!r} only")


def _code(language: str) -> str:
    """Whisper's code of a language where it has one; else what was asked, in lower case."""
    try:
        return language_code(language)
    except UsageError:
        return language.strip().lower()


def _near(asked: str, codes: list[str]) -> str:
    """The languages of a model whose code or English name is like what was asked, and how many there are."""
    names = {name: code for code in codes for name in (code.lower(), LANGUAGES.get(code)) if name}
    near = difflib.get_close_matches(asked.strip().lower(), names, n=5, cutoff=0.5)
    found = list(dict.fromkeys(names[name] for name in near))
    if not found or len(codes) <= FEW:
        return f"known: {_some(codes)}"
    shown = ", ".join(f"{code} {LANGUAGES[code].title()}" if code in LANGUAGES else code for code in found)
    return f"near: {shown}; it knows {len(codes)}"


def _some(codes: list[str]) -> str:
    shown = ", ".join(codes[:FEW])
    return shown if len(codes) <= FEW else f"{len(codes)} languages: {shown}, …"
