"""Isolate the failure of one item in a batch."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from multimodal.errors import CheckpointError, MultimodalError, UsageError
from multimodal.system.memory import out_of_memory

Result = TypeVar("Result")
OF_ALL = (UsageError, CheckpointError)  # not the fault of one item


def in_parts(work: Callable[[slice], Sequence[Result]], count: int) -> list[Result | Exception]:
    """Run `work` on all `count` items; on failure, such as out of memory, on halves, down to single items. An item that
    fails alone gives its exception as result."""
    results: list[Result | Exception] = []
    parts = [slice(0, count)] if count else []
    while parts:
        part, failure = parts.pop(), None
        try:
            results += list(work(part))
            continue
        except OF_ALL:
            raise
        except Exception as error:
            failure = error if part.stop - part.start == 1 else None
        if failure is not None:
            results.append(failure)
        else:  # outside `except`, which would keep the tensors of the failed attempt alive
            middle = (part.start + part.stop) // 2
            parts += [slice(middle, part.stop), slice(part.start, middle)]
    return results


def in_parts_of(work: Callable[[list[Any]], Sequence[Result]], items: list[Any]) -> list[Result | Exception]:
    """`in_parts` of work on lists of items."""
    return in_parts(lambda part: work(items[part]), len(items))


def item_error(error: Exception, name: str, kind: type[MultimodalError]) -> MultimodalError:
    """The failure of one item as a typed error that names it. Typed errors pass unchanged."""
    if isinstance(error, MultimodalError):
        return error
    cause = out_of_memory(error) or (isinstance(error, OSError) and error.strerror)
    typed = kind(f"{name}: {cause or f'{type(error).__name__}: {error}'.rstrip(': ')}")
    typed.__cause__ = error
    return typed
