"""What the names of special tokens say: languages to translate between, and the sentinels of masked spans."""

import re
from collections.abc import Mapping

# M2M100 `__de__`, NLLB `deu_Latn`, Marian `>>deu<<`; not mBART's `de_DE`, whose two versions put it in other places
LANGUAGE = re.compile(r"__(?P<m2m>[a-z]{2,3})__|(?P<nllb>[a-z]{3}_[A-Z][a-z]{3})|>>(?P<marian>\w+)<<")
SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")


def language_of(token: str) -> str | None:
    """The language that a special token of this name stands for; None for other tokens."""
    found = LANGUAGE.fullmatch(token)
    return next(filter(None, found.groups())) if found else None


def languages_of(names: Mapping[str, int]) -> dict[str, int]:
    """Of each language among special tokens its id, in the order of ids."""
    found = {code: i for name, i in names.items() if (code := language_of(name)) is not None}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def sentinels_of(names: Mapping[str, int]) -> tuple[int, ...]:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, …"""
    found = {int(match[1]): i for name, i in names.items() if (match := SENTINEL.fullmatch(name))}
    return tuple(found[number] for number in sorted(found))
