"""Options declared once, as class attributes: default, limits and help; checks and command-line flags follow.

No dataclasses: their import and the classes they compile take 30 ms, half of the time of a command's --help."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Never,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from multimodal.errors import UsageError, did_you_mean


class Option:
    """Declaration of an option. `low`, `high`: limits of a number; `above`: `low` itself is excluded. `read(value)`
    returns the value of a type other than bool, int, float and str, or raises UsageError, without the option's name.
    `kinds`: types, from the annotation of the class attribute; a `tuple[int, ...]` without `read` holds one value or
    more, within the limits. `also`: other spellings of its flag."""

    def __init__(
        self, default: Any, help: str, metavar: str | None, low: float, high: float, above: bool,
        choices: tuple[str, ...], read: Callable[[Any], Any] | None, also: tuple[str, ...] = (),
    ):  # fmt: skip
        self.default, self.help, self.metavar = default, help, metavar
        self.low, self.high, self.above, self.choices, self.read = low, high, above, choices, read
        self.also = also
        self.kinds: tuple[Any, ...] = ()

    @property
    def several(self) -> bool:
        return get_origin(self.kinds[0]) is tuple and self.read is None

    def but(self, default: Any, **changes: Any) -> Any:
        """The same option with another default."""
        made = Option.__new__(Option)
        vars(made).update(vars(self), default=default, **changes)
        return made

    def checked(self, value: Any) -> Any:
        """The value in the option's type. Raises UsageError."""
        if value is None and NoneType in self.kinds:
            return None
        if self.read is not None:
            return self.read(value)
        if not self.several:
            return self._one(value, self.kinds[0])
        if not isinstance(value, list | tuple) or not value:
            raise UsageError(f"must be a list of one value or more (got {value!r:.40})")
        return tuple(self._one(one, get_args(self.kinds[0])[0]) for one in value)

    def _one(self, value: Any, kind: Any) -> Any:
        if self.choices:
            return one_of(value, self.choices)
        if kind in (int, float):
            return number(value, kind, self.low, self.high, self.above)
        if not isinstance(value, kind):
            optional = NoneType in self.kinds
            expected = "a string" if kind is not bool else "True, False or None" if optional else "True or False"
            raise UsageError(f"must be {expected} (got {value!r:.40})")
        return value

    def of_text(self, text: str) -> Any:
        """The value of a flag, or one of several. Raises ArgumentTypeError."""
        kind, value = get_args(self.kinds[0])[0] if self.several else self.kinds[0], text
        if text == "None" and NoneType in self.kinds:
            return None
        if kind is bool:
            value = {"True": True, "False": False}.get(text, text)
        elif kind in (int, float) and self.read is None:
            with suppress(ValueError):  # the check then names what was expected
                value = kind(text)
        try:
            return self._one(value, kind) if self.several else self.checked(value)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def described(self) -> str:
        """The help of its flag."""
        text, default = self.help, self.default
        if self.several:
            default = " ".join(map(str, default))
        if "(default" not in text and default is not False and default not in (None, "", ()):
            text += f" (default: {default:g})" if type(default) in (int, float) else f" (default: {default})"
        return text.replace("%", "%%")


def option(
    default: Any, help: str = "", metavar: str | None = None, *, low: float = -math.inf, high: float = math.inf,
    above: bool = False, choices: Iterable[str] = (), read: Callable[[Any], Any] | None = None,
    also: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Declare an option of a subclass of OptionSet: an `Option` in the class, its value in an instance."""
    return Option(default, help, metavar, low, high, above, tuple(choices), read, also)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option,))
class OptionSet:
    """Base of immutable options. Raises UsageError for an unknown name or a bad value."""

    declared: ClassVar[dict[str, Option]] = {}

    def __init_subclass__(cls) -> None:
        cls.declared = {}
        for part in reversed(cls.__mro__):
            for name, kind in getattr(part, "__annotations__", {}).items():
                if isinstance(own := vars(part).get(name), Option):
                    own.kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
                    cls.declared[name] = own

    def __init__(self, **values: Any):
        vars(self).update({name: own.default for name, own in self.declared.items()} | self.checked(values))
        self.check()

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values in the types of the options, each checked by itself."""
        made = {}
        for name, value in values.items():
            if name not in cls.declared:
                known = ", ".join(cls.declared)
                raise UsageError(f"option {name!r}: unknown{did_you_mean(name, cls.declared)} (known: {known})")
            try:
                made[name] = cls.declared[name].checked(value)
            except UsageError as error:
                raise error if error.argument == name else UsageError(error, argument=name) from None
        return made

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Select the values that are options."""
        return {name: value for name, value in values.items() if name in cls.declared}

    def check(self) -> None:
        """Raise UsageError for values that contradict each other."""

    def replace(self, **changes: Any) -> Any:
        return type(self)(**vars(self) | changes)

    def __setattr__(self, name: str, value: Any) -> Never:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def add_flags(group: Any, options: type[OptionSet], names: Iterable[str] = (), defaults: bool = False) -> None:
    """Add the flag of each option, or of `names`, to an argparse group. The word None stands for None, as in
    openai-whisper. A flag that is not given leaves no value behind, so that a model's own defaults hold, or, with
    `defaults`, the option's."""
    for name in names or options.declared:
        own = options.declared[name]
        default = own.default if defaults else argparse.SUPPRESS
        common = {"help": own.described(), "type": own.of_text, "default": default}
        spelled = [f"--{spelling}" for spelling in (name, *own.also)]
        if own.kinds[0] is bool:
            group.add_argument(*spelled, metavar="BOOL", nargs="?", const=True, **common)
        else:
            metavar = own.metavar or "|".join(own.choices) or name.upper()
            group.add_argument(*spelled, metavar=metavar, nargs="+" if own.several else None, **common)


def one_of(value: Any, choices: Iterable[str]) -> str:
    if value not in choices:
        raise UsageError(f"must be one of {', '.join(choices)} (got {value!r:.40})")
    return value


def number(
    value: Any, kind: type = float, low: float | int = -math.inf, high: float | int = math.inf, above: bool = False,
    below: bool = False,
) -> Any:  # fmt: skip
    """Check a number. An integer may stand for a float, numpy's numbers for Python's; a bool is no number."""
    real = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if real and low <= value <= high and not (above and value == low) and not (below and value == high):
        return kind(value)
    limits, named = "", "an integer" if kind is int else "a number"
    if real and below and value == high == math.inf:
        named = "a finite number"
    if high < math.inf:
        limits = f" in {'(' if above else '['}{low:.10g}, {high:.10g}{')' if below else ']'}"
    elif low > -math.inf:
        limits = f" above {low:.10g}" if above else f" of at least {low:.10g}"
    raise UsageError(f"must be {named}{limits} (got {value!r:.40})")


def entries(value: Any, of: Callable[[str], Any], check: Callable[[Any], Any]) -> tuple:
    """A string with commas or a sequence, each entry checked."""
    try:
        parts = [of(part) for part in value.split(",") if part.strip()] if isinstance(value, str) else list(value)
    except (TypeError, ValueError):
        raise UsageError(f"must be a list, or values with commas between (got {value!r:.40})") from None
    return tuple(check(part) for part in parts)


class Limits(NamedTuple):
    """Limits of a number in the annotation of a dataclass's field. `above`, `below`: the limits themselves are not
    allowed."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False


Positive = Annotated[int, Limits(1)]
Natural = Annotated[int, Limits(0)]
Share = Annotated[float, Limits(0, 1)]
PositiveShare = Annotated[float, Limits(0, 1, above=True)]
Rate = Annotated[float, Limits(0, 1, below=True)]  # such as of dropout
NonNegativeFloat = Annotated[float, Limits(0, math.inf, below=True)]
Temperature = Annotated[float, Limits(0)]  # infinity: all alike
PositiveFloat = Annotated[float, Limits(0, math.inf, above=True, below=True)]
ProperShare = Annotated[float, Limits(0, 1, above=True, below=True)]  # neither nothing nor all


def check_limits(settings: Any) -> None:
    """Raise UsageError for a number outside of the `Limits` of its field, also in nested dataclasses; None passes."""
    for name, kind in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if hasattr(value, "__dataclass_fields__"):
            check_limits(value)
        kind = get_args(kind)[0] if get_origin(kind) is Union else kind  # with None
        one, *limits = get_args(kind) if get_origin(kind) is Annotated else [kind]
        if value is not None and limits and isinstance(limits[0], Limits):
            try:
                number(value, one, *limits[0])
            except UsageError as error:
                raise UsageError(error, argument=name) from None
