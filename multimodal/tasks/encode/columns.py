"""Batches as columns: the form in which Ray Data, Spark and Dask call an object."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np

from multimodal.errors import MultimodalError, UsageError

Columns = Mapping[str, np.ndarray]
MEDIA = ("bytes", "image", "audio")  # left out of the results
SOURCES = (*MEDIA, "path", "text")


def is_columns(batch: Any) -> TypeGuard[Columns]:
    """Return True for a mapping whose values are all arrays; one with `array` is a recording."""
    if not isinstance(batch, Mapping) or "array" in batch:
        return False
    return all(isinstance(values, np.ndarray) for values in batch.values())


def source_column(batch: Any) -> tuple[str, list[Any]]:
    """Name and values of the first of the columns bytes, image, audio, path and text. Raises UsageError without any."""
    if not isinstance(batch, Mapping):
        raise UsageError(f"expected a mapping of columns (got {type(batch).__name__})", argument="batch")
    name = next((name for name in SOURCES if name in batch), None)
    if name is None:
        names = ", ".join(map(str, batch)) or "none"
        raise UsageError(f"expected a column {', '.join(SOURCES)} (got {names})", argument="batch")
    if isinstance(batch[name], str | bytes):  # which would pass as a column of characters
        raise UsageError(f"column {name}: expected an array (got {type(batch[name]).__name__})", argument="batch")
    return name, [value.item() if isinstance(value, np.generic) else value for value in batch[name]]


def result_columns(
    batch: Columns, results: Iterable[Any], row: Callable[[Any], Mapping[str, Any]], failed: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The batch's columns without the media, those of `row(result)`, and `error`: empty, or the line of an item that
    failed, whose other values are `failed`."""
    errors, rows = [], []
    for result in results:
        bad = isinstance(result, MultimodalError)
        errors.append(str(result) if bad else "")
        rows.append(failed if bad else row(result))
    made = {name: values for name, values in batch.items() if name not in MEDIA}
    for name, nothing in failed.items():
        values = [one[name] for one in rows]
        made[name] = np.array(values, np.float32 if isinstance(nothing, float | np.ndarray) else object)
    return made | {"error": np.array(errors, object)}
