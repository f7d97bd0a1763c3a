"""A few of many parameters run often, the others seldom."""

from collections.abc import Iterable
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
