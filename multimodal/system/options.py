"""Options declared once, as fields of a dataclass: default, limits and help; checks and command-line flags follow."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from functools import partial
from types import NoneType, UnionType
from typing import Any, get_args

from multimodal.errors import UsageError


@dataclass(frozen=True)
class Option:
    """Metadata of a field. `low`, `high`: limits of a number; `above`: `low` itself is excluded. `read(value)` returns
    the value of a type other than bool, int, float and str, or raises UsageError, without the option's name."""

    help: str
    metavar: str | None
    low: float | int
    high: float | int
    above: bool
    choices: tuple[str, ...]
    read: Callable[[Any], Any] | None


def option(
    default: Any, help: str, metavar: str | None = None, *, low: float | int = -math.inf, high: float | int = math.inf,
    above: bool = False, choices: Iterable[str] = (), read: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """A field of an options dataclass."""
    return field(default=default, metadata={"option": Option(help, metavar, low, high, above, tuple(choices), read)})


def checked(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the types of the dataclass `options`. Raises UsageError for an unknown name or a bad value."""
    known = {f.name: f for f in fields(options)}
    for name in values:
        if name not in known:
            raise UsageError(f"option {name!r}: unknown (known: {', '.join(known)})")
    return {name: _checked(known[name], value) for name, value in values.items()}


def _checked(f: Field, value: Any) -> Any:
    kinds = _kinds(f)
    if value is None and NoneType in kinds:
        return None
    o: Option = f.metadata["option"]
    try:
        if o.read is not None:
            return o.read(value)
        if o.choices:
            return one_of(value, o.choices)
        if kinds[0] in (int, float):
            return number(value, kinds[0], o.low, o.high, o.above)
    except UsageError as error:
        raise UsageError(error, argument=f.name) from None
    if not isinstance(value, kinds[0]):
        expected = "True or False" if kinds[0] is bool else "a string"
        raise UsageError(f"must be {expected} (got {value!r:.40})", argument=f.name)
    return value


def _kinds(f: Field) -> tuple[Any, ...]:
    return get_args(f.type) if isinstance(f.type, UnionType) else (f.type,)


def one_of(value: Any, choices: Iterable[str]) -> str:
    if value not in choices:
        raise UsageError(f"must be one of {', '.join(choices)} (got {value!r:.40})")
    return value


def number(
    value: Any, kind: type = float, low: float | int = -math.inf, high: float | int = math.inf, above: bool = False
) -> Any:
    """Check a number. An integer may stand for a float; a bool is no number."""
    real = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if real and low <= value <= high and not (above and value == low):
        return kind(value)
    limits = ""
    if high < math.inf:
        limits = f" in {'(' if above else '['}{low:g}, {high:g}]"
    elif low > -math.inf:
        limits = f" above {low:g}" if above else f" of at least {low:g}"
    raise UsageError(f"must be {'an integer' if kind is int else 'a number'}{limits} (got {value!r:.40})")


def entries(value: Any, of: Callable[[str], Any], check: Callable[[Any], Any]) -> tuple:
    """A string with commas or a sequence, each entry checked."""
    try:
        parts = [of(part) for part in value.split(",") if part.strip()] if isinstance(value, str) else list(value)
    except (TypeError, ValueError):
        raise UsageError(f"must be a list, or values with commas between (got {value!r:.40})") from None
    return tuple(check(part) for part in parts)


def add_flags(group: Any, options: type, names: Iterable[str]) -> None:
    """Add the flag of each option to an argparse group. A flag that is not given leaves no value behind, so that a
    model's own defaults hold; the word None stands for None, as in openai-whisper."""
    known = {f.name: f for f in fields(options)}
    for name in names:
        f = known[name]
        o: Option = f.metadata["option"]
        common = {"help": _help(f), "default": argparse.SUPPRESS, "type": partial(_of_text, f)}
        if _kinds(f)[0] is bool:
            group.add_argument(f"--{name}", metavar="BOOL", nargs="?", const=True, **common)
        else:
            metavar = o.metavar or "|".join(o.choices) or name.upper()
            group.add_argument(f"--{name}", metavar=metavar, **common)


def _help(f: Field) -> str:
    text, default = f.metadata["option"].help, f.default
    if "(default" not in text and default is not False and default not in (None, ""):
        text += f" (default: {default:g})" if type(default) in (int, float) else f" (default: {default})"
    return text.replace("%", "%%")


def _of_text(f: Field, text: str) -> Any:
    kinds, value = _kinds(f), text
    if text == "None" and NoneType in kinds:
        return None
    if kinds[0] is bool:
        value = {"True": True, "False": False}.get(text, text)
    elif kinds[0] in (int, float) and f.metadata["option"].read is None:
        with suppress(ValueError):  # the check then names what was expected
            value = kinds[0](text)
    try:
        return _checked(f, value)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.args[0]) from None
