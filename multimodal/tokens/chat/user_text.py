"""Texts that remember which of their characters users wrote while a chat template works on them.

A template sees ordinary texts. What it makes of users' texts counts as theirs, but for operations that keep characters
apart: concatenation, slices, `strip`, `split`, `replace` and `join`."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from multimodal.tokens.chat.budget import LISTS, TEXTS
from multimodal.tokens.text.tokenizer import MARK

# functions that hand back what they take, or numbers
HANDING = {
    "attr", "batch", "copy", "count", "d", "default", "dict", "dictsort", "first", "get", "groupby", "items", "keys",
    "last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr",
    "slice", "sort", "sum", "unique", "values",
}  # fmt: skip
KEEPING = {"join", "lstrip", "replace", "rsplit", "rstrip", "split", "string", "strip", "trim"}  # methods below
PRINTED = frozenset({str, int, float, bool, type(None)})


class UserText(str):
    """`_user`: 1 for each character that a user wrote, 0 for the template's. Default: all are a user's."""

    __slots__ = ("_user",)  # with an underscore, which templates may not read
    _user: bytes

    def __new__(cls, text: str, user: bytes | None = None) -> "UserText":
        made = super().__new__(cls, text)
        made._user = b"\1" * len(text) if user is None else user
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> "UserText":
        text, user = super().__getitem__(key), self._user[key]
        return UserText(text, user if isinstance(user, bytes) else bytes([user]))

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> str:
        return joined([self, other])

    def __radd__(self, other: str) -> str:
        return joined([other, self])

    def __mul__(self, count: Any) -> "UserText":
        return UserText(super().__mul__(count), self._user * count)

    __rmul__ = __mul__

    def lstrip(self, chars: str | None = None, /) -> "UserText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "UserText":
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> "UserText":
        return self.lstrip(chars).rstrip(chars)

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._found(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._found(super().rsplit(sep, maxsplit), sep)

    def _found(self, pieces: list[str], sep: str | None) -> list[str]:
        """These pieces with their users, in order, `sep` apart; None: any blanks."""
        found, at = list[str](), 0
        for piece in pieces:
            at = self.find(piece, at) if sep is None else at
            found.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return found

    def replace(self, old: str, new: str, count: Any = -1, /) -> str:
        if not old:
            return UserText(super().replace(old, new, count))
        return UserText(new, users(new)).join(self.split(old, count))

    def join(self, parts: Iterable[str], /) -> str:
        parts = list(parts)
        texts: list[str] = [self] * (2 * len(parts) - 1)
        texts[::2] = parts
        return joined(texts)


def users(text: str) -> bytes:
    return text._user if isinstance(text, UserText) else bytes(len(text))


def joined(texts: Sequence[str]) -> str:
    """Concatenate texts, of which those that are no UserText are the template's."""
    text = "".join(texts)
    return UserText(text, b"".join(map(users, texts))) if UserText in map(type, texts) else text


def printed(value: Any) -> Any:
    """Text or number that a template prints. Other values may hold users' texts."""
    return value if type(value) is UserText or type(value) in PRINTED else UserText(str(value))


def own(value: Any) -> Any:
    """A text as the template's."""
    return UserText(value, bytes(len(value))) if type(value) is str else value


def tracked(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    call: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Result of a template's function `name`; what it makes of users' texts is theirs. `call`: calls it."""
    owner = getattr(function, "__self__", None)
    users_own = name not in HANDING and any(map(_holds, (owner, *args, *kwargs.values())))
    if users_own and name in KEEPING:
        function = getattr(own(owner), name) if isinstance(owner, str) else function
        args, kwargs = [*map(own, args)], {key: own(value) for key, value in kwargs.items()}
    made = (partial(call, function) if call else function)(*args, **kwargs)
    return _theirs(made, name in KEEPING) if users_own else made


def _theirs(value: Any, kept: bool) -> Any:
    """A result as the users'. `kept`: UserTexts in it are right."""
    if isinstance(value, list | tuple):
        return type(value)([_theirs(one, kept) for one in value])
    return UserText(value) if isinstance(value, str) and not (kept and type(value) is UserText) else value


def _holds(value: Any) -> bool:
    """True for values with users' texts. Bytes and HTML count as such."""
    if type(value) is UserText:
        return 1 in value._user
    value = getattr(value, "_Namespace__attrs", value)
    if isinstance(value, dict):
        return any(map(_holds, (*value, *value.values())))
    if isinstance(value, LISTS):
        return any(map(_holds, value))
    return isinstance(value, TEXTS) and type(value) is not str


def marked(text: str, control: Iterable[str]) -> str:
    """The text with a `MARK` in each name of a control token that has a user's character, at the first of them."""
    user, text = users(text), "".join((text,))
    names = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
    cuts, at = set[int](), 0
    while found := names.search(text, at):
        at = found.start() + 1  # names may overlap
        if (first := user.find(1, *found.span())) >= 0:
            cuts.add(max(first, at))
    return MARK.join(text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)]))
