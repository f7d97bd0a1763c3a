"""A few of many parameters run often, the others seldom."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Case = type(pytest.param())  # pytest names it for itself alone


def spread(values: Iterable[Any], every: int, rest: Any, first: Any = ()) -> list[Any]:
    """Return parameters: the first and each `every`-th after it has the mark `first`, or none; the others have `rest`.

    A tuple holds the values of several parameters. What has a mark already stays as it is and is not counted."""
    cases, count = [], 0
    for value in values:
        case = value
        if not isinstance(value, Case):
            case = pytest.param(*(value if isinstance(value, tuple) else (value,)))
        if not case.marks:
            case = pytest.param(*case.values, id=case.id, marks=rest if count % every else first)
            count += 1
        cases.append(case)
    return cases


def thin(every: int, rest: Any, first: Any = ()) -> Callable[[Any], Any]:
    """Decorate a test: of the parameters that the decorator below states, the first and each `every`-th after it have
    the mark `first`, or none; the others have `rest`."""

    def decorate(test: Any) -> Any:
        names, values, *more = test.pytestmark[-1].args
        if isinstance(names, str) and "," not in names:  # a tuple is one value
            values = [one if isinstance(one, Case) else pytest.param(one) for one in values]
        cases = spread(values, every, rest, first)
        test.pytestmark[-1] = pytest.mark.parametrize(names, cases, *more, **test.pytestmark[-1].kwargs).mark
        return test

    return decorate


def firsts(rest: Any) -> Callable[[Any], Any]:
    """Decorate a test: of the names that the decorator below states, the first of each family, a name up to its comma,
    stays as it is, the others have the mark `rest`."""

    def decorate(test: Any) -> Any:
        one, names = test.pytestmark[-1].args
        seen: set[str] = set()
        cases = []
        for name in names:
            family = name.partition(",")[0]
            cases.append(pytest.param(name, marks=rest if family in seen else ()))
            seen.add(family)
        test.pytestmark[-1] = pytest.mark.parametrize(one, cases).mark
        return test

    return decorate
