"""The work that one rendering may do: lines of the template, weighed values, seconds."""

import sys
from collections.abc import Iterator, MappingView
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

MOST_LINES = 200_000  # executed by a template: a hundred messages take about 5,000
MOST_WORK = 1 << 26  # characters, with `ELEMENT` and `OPERATION`, of all that operations take and make
FOR_EACH = 64  # more of them for each character of the conversation; templates in use take up to 16
MOST_SECONDS = 20.0
MOST_SIZE = 1 << 20  # elements that one operation may take, and the largest number
ELEMENT = 16  # characters that weigh like an element, by memory
OPERATION = 64  # what weighs like an operation, by time
TEXTS, LISTS, NUMBERS = (str, bytes), (list, tuple, dict), (int, float)  # unions of types are slower


class RenderBudget:
    """Work that is left. `spend` raises SecurityError when it is used up."""

    def __init__(self, length: int) -> None:
        self.lines, self.most, self.end = MOST_LINES, MOST_WORK + FOR_EACH * length, monotonic() + MOST_SECONDS
        self.work = self.most

    def spend(self, work: int) -> None:
        self.work -= work
        if self.work < 0 or monotonic() > self.end:
            self.refuse()

    def refuse(self) -> None:
        from jinja2.exceptions import SecurityError

        if self.lines < 0:
            raise SecurityError(f"does not end within {MOST_LINES} steps")
        if self.work < 0:
            raise SecurityError(f"takes and makes more than {self.most} characters in all")
        raise SecurityError(f"does not end within {MOST_SECONDS:g} seconds")


_budget: ContextVar[RenderBudget] = ContextVar("_budget")  # of the rendering in this thread


@contextmanager
def bounded(length: int) -> Iterator[None]:
    """Give a budget to what is compiled and rendered inside, for a conversation of `length` characters: nested loops
    end, but not soon."""
    budget = RenderBudget(length)

    def line(frame: Any, event: str, argument: Any) -> Any:
        budget.lines -= 1
        if budget.lines < 0 or monotonic() > budget.end:
            budget.refuse()
        return line

    before, token = sys.gettrace(), _budget.set(budget)
    sys.settrace(lambda frame, event, argument: line if frame.f_code.co_filename == "<template>" else None)
    try:
        yield
    finally:
        sys.settrace(before)
        _budget.reset(token)


def charge(work: int) -> None:
    _budget.get().spend(work)


def size(value: Any) -> int:
    """Weight of a value without what its elements hold."""
    if isinstance(value, TEXTS):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, LISTS) else 0


def weight(value: Any) -> int:
    """Characters of all texts in a value, with those that occur twice, and `ELEMENT` for each element. Raises
    SecurityError for more than `MOST_SIZE` elements."""
    from jinja2.exceptions import SecurityError
    from jinja2.utils import Namespace

    if type(value) is str:  # almost always
        return len(value)
    found, elements, left = 0, 0, [value]
    while left:
        one = left.pop()
        if type(one) is str:
            found += len(one)
            continue
        if isinstance(one, Namespace):
            one = one._Namespace__attrs
        elif isinstance(one, MappingView):
            one = list(one)
        found += size(one)
        if not isinstance(one, LISTS):
            continue
        elements += len(one)
        if elements > MOST_SIZE:
            raise SecurityError(f"more than {MOST_SIZE} elements")
        held = [*one, *one.values()] if isinstance(one, dict) else one
        left += [each for each in held if not isinstance(each, NUMBERS)]
    return found
