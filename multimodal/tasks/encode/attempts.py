"""A batch of which one item fails: the failure is that item's own."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from multimodal.errors import CheckpointError, MultimodalError, UsageError
from multimodal.system.memory import out_of_memory

Result = TypeVar("Result")
OF_ALL = (UsageError, CheckpointError)  # no fault of an item


def in_parts(work: Callable[[slice], Sequence[Result]], count: int) -> list[Result | Exception]:
    """`work` of all `count` items at once; where that fails, as for want of memory, of halves, down to single items,
    whose failure takes the place of their result."""
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
        else:  # outside of `except`, which would hold the tensors of the failed attempt
            middle = (part.start + part.stop) // 2
            parts += [slice(middle, part.stop), slice(part.start, middle)]
    return results


def item_error(error: Exception, name: str, kind: type[MultimodalError]) -> MultimodalError:
    """What ended the work on one item, as an error of that item, so that the others go on. One that is typed already
    names its item."""
    if isinstance(error, MultimodalError):
        return error
    cause = out_of_memory(error) or (isinstance(error, OSError) and error.strerror)
    made = kind(f"{name}: {cause or f'{type(error).__name__}: {error}'.rstrip(': ')}")
    made.__cause__ = error
    return made
