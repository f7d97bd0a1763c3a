"""Checks of regular expressions and replacements in a `tokenizer.json`, and errors in place of the library's panics.

The library's regular expressions backtrack; after ten million steps they panic, with a `PanicException`, which is not
an `Exception`, and a hundred lines on stderr."""

import base64
import math
import os
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from multimodal.errors import CheckpointError, MultimodalError, one_line
from multimodal.system.files import shown

MOST_PATTERN = 2000  # characters; the longest in use have about 400
MOST_REPEATS = 3  # unbounded, in one branch: time may grow with this power of a run's length
MOST_COUNT = 100  # of {n}
MOST_GROWTH = 4096  # times the length of a text; steps in use have less than 100 together
SLOW = 0.1  # CPU seconds for a probe; patterns in use take a thousandth
# runs, each followed by what a pattern may wait for: otherwise the library skips the attempt
_PROBES = [*(c * 200 + "\0" + string.printable for c in "aA1 \n\t!._-é日"), "The cat, 12 of 99 dogs; it's " * 10]
_lock = threading.Lock()
_quiet: dict[str, int] = {"users": 0, "stderr": -1}


def patterns_of(value: Any) -> Iterator[str]:
    """Yield the regular expressions of a pipeline, at any depth."""
    if isinstance(value, dict):
        if isinstance(pattern := value.get("Regex"), str):
            yield pattern
        value = [part for name, part in value.items() if name not in ("vocab", "merges")]
    if isinstance(value, list):
        for part in value:
            yield from patterns_of(part)


def check_pattern(pattern: str) -> None:
    """Raise CheckpointError for a pattern whose time may grow beyond the third power of a run's length: nested repeats,
    repeated alternatives such as (a|a)*, back references, group calls, or too many repeats in a row."""
    if len(pattern) > MOST_PATTERN:
        raise CheckpointError(f"a regular expression of {len(pattern)} characters, more than {MOST_PATTERN}")
    if reason := _Scan(pattern).fault():
        raise CheckpointError(f"the regular expression {shown(pattern)} could take forever ({reason})")


def check_time(encode: Callable[[str], object]) -> None:
    """Raise CheckpointError if a run of one character, or prose, takes long: cubic time, as of a*a*a*b, passes
    `check_pattern`."""
    for probe in _PROBES:
        start = time.thread_time()
        encode(probe)
        if (took := time.thread_time() - start) > SLOW:
            text = shown(probe[:10])
            raise CheckpointError(f"its regular expressions take {took:.1f} s for {len(probe)} characters like {text}")


def check_growth(steps: Any) -> None:
    """Raise CheckpointError for a normalizer or decoder whose steps in a row may make a text longer without bound."""
    if (growth := _growth(steps)) > MOST_GROWTH:
        raise CheckpointError(f"its replacements may make a text {growth:.0f} times as long, more than {MOST_GROWTH}")


def _growth(step: Any) -> float:
    """By every field of a step, whatever its type: the library ignores those that its type does not have."""
    growth = 1.0
    match step:
        case {"content": str(text), "pattern": {"String": str(found)}} if found:
            growth = max(growth, len(text) / len(found))
        case {"content": str(text), "pattern": _}:  # may match between characters
            growth = len(text) + 1.0
    match step:
        case {"prepend": str(text)}:
            growth *= len(text) + 1.0
    match step:
        case {"precompiled_charsmap": str(code)}:  # its trie's size, the trie, texts that end in NUL
            data = base64.b64decode(code)
            growth *= max(1.0, *map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
    inner = [step.get(name) for name in ("normalizers", "decoders")] if isinstance(step, dict) else []
    return growth * math.prod(_growth(one) for part in inner if isinstance(part, list) for one in part)


class _Scan:
    """One pass over a pattern. `open`, for the pattern and each open group: repeats in this branch, most in an earlier
    branch, has branches, has a fixed count."""

    def __init__(self, pattern: str):
        self.text, self.at = pattern, 0
        self.open: list[list[int]] = [[0, 0, 0, 0]]
        self.last = [0, 0, 0]  # of the last atom: repeats, has a choice, has a fixed count

    def fault(self) -> str:
        while self.at < len(self.text):
            if reason := self._step(self.text[self.at]):
                return reason
        return "" if self._most(self.open[0]) <= MOST_REPEATS else "too many repeats in a row"

    def _most(self, group: list[int]) -> int:
        return max(group[0], group[1])

    def _step(self, c: str) -> str:
        self.at += 1
        if c == "\\":
            name, self.at = self.text[self.at : self.at + 1], self.at + 1
            if name in "gk" or name in "123456789":
                return "a reference to a group"
            if name in "pPxuo" and self.text[self.at : self.at + 1] == "{":
                self.at = self.text.find("}", self.at) + 1 or len(self.text)
            self.last = [0, 0, 0]
        elif c == "[":
            self._skip_class()
            self.last = [0, 0, 0]
        elif c == "(":
            return self._group()
        elif c == ")" and len(self.open) > 1:
            group = self.open.pop()
            self.last = [self._most(group), *group[2:]]
            self.open[-1][0] += self.last[0]
            self.open[-1][3] |= group[3]
        elif c == "|":
            group = self.open[-1]
            group[:] = [0, self._most(group), 1, group[3]]
        elif c in "*+" or (c == "{" and self._counted()):
            return self._repeat()
        elif c != "?":
            self.last = [0, 0, 0]
        return ""

    def _counted(self) -> bool:
        """Return True if a brace begins a count: {2}, {2,} or {,3}."""
        inner = self.text[self.at :].partition("}")[0]
        return inner != "" and not inner.strip("0123456789,")

    def _repeat(self) -> str:
        most, fixed = MOST_COUNT + 1, False
        if self.text[self.at - 1] == "{":
            inner, self.at = self.text[self.at :].partition("}")[0], self.text.index("}", self.at) + 1
            numbers = [int(part[:9]) for part in inner.split(",") if part]
            if max(numbers) > MOST_COUNT:
                return f"{{{max(numbers)}}} times"
            most, fixed = most if inner.endswith(",") else max(numbers), "," not in inner
        while self.at < len(self.text) and self.text[self.at] in "?+":  # lazy or possessive
            self.at += 1
        if most > 1 and any(self.last[: 3 if most <= MOST_COUNT else 2]):
            return "a repeat of a repeat or of a choice"
        self.last = [int(not fixed), 0, int(fixed)]
        self.open[-1][0] += most > 1 and not fixed
        self.open[-1][3] |= fixed
        return ""

    def _group(self) -> str:
        rest = self.text[self.at : self.at + 4]
        if rest.startswith(("?(", "?&", "?R", "?P", "?~", "*", "?{")):
            return "a condition, a call or a callout"
        self.open.append([0, 0, 0, 0])
        if len(self.open) > 32:
            return "groups too deep"
        while rest[:1] == "?" and self.at < len(self.text) and self.text[self.at] not in ":=!>)":
            self.at += 1  # flags, a name or the sign of a look-around
        if rest[:1] == "?" and self.text[self.at : self.at + 1] != ")":
            self.at += 1
        return ""

    def _skip_class(self) -> None:
        depth, self.at = 1, self.at + (self.text[self.at : self.at + 1] == "^")
        self.at += self.text[self.at : self.at + 1] == "]"  # a first one is itself
        while depth and self.at < len(self.text):
            c = self.text[self.at]
            depth += (c == "[") - (c == "]")
            self.at += 2 if c == "\\" else 1


@contextmanager
def no_panic(what: str, error: type[MultimodalError]) -> Iterator[None]:
    """Turn a panic of the `tokenizers` library into `error`, without its lines on stderr."""
    with _lock:
        if not _quiet["users"]:
            _quiet["stderr"] = os.dup(2)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.close(null)
        _quiet["users"] += 1
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != "PanicException":
            raise
        raise error(f"{what}: the tokenizers library failed ({one_line(panic, 80)})") from None
    finally:
        with _lock:
            _quiet["users"] -= 1
            if not _quiet["users"]:
                os.dup2(_quiet["stderr"], 2)
                os.close(_quiet["stderr"])
