"""Batches as columns: the form in which Ray Data, Spark and Dask call an object."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from multimodal.errors import MultimodalError, UsageError

Columns = Mapping[str, np.ndarray | Sequence[Any]]  # or pandas' series
MEDIA = ("bytes", "image", "audio")  # left out of the results
SOURCES = (*MEDIA, "path", "text")


def is_columns(batch: Any) -> TypeGuard[Columns]:
    """Return True for a mapping whose values are all columns, but one with `array` is a recording; and for pandas'
    frames, which `source_column` refuses."""
    if not isinstance(batch, Mapping):
        return hasattr(batch, "iloc")
    return "array" not in batch and all(map(_is_column, batch.values()))


def _is_column(values: Any) -> bool:
    """True for lists, arrays (also pyarrow's), and the series of pandas and polars."""
    dimensions = hasattr(values, "__array__") and hasattr(values, "__len__")
    return isinstance(values, list | tuple) or getattr(values, "ndim", dimensions) > 0


def source_column(batch: Any, made: Iterable[str]) -> tuple[str, list[Any], dict[str, np.ndarray]]:
    """Name and values of the first of the columns bytes, image, audio, path and text, and the columns that the results
    keep. Raises UsageError without any, for columns of several lengths, and for one named like a result (`made`)."""
    if not isinstance(batch, Mapping):
        how = 'as {"path": series}, or the series in many()' if getattr(batch, "ndim", 2) == 1 else "as dict(frame)"
        got = type(batch).__name__
        raise UsageError(f"expected a mapping of columns, {how} (got {got})", argument="batch")
    for name, values in batch.items():
        if not _is_column(values):
            raise UsageError(f"column {name}: expected an array (got {type(values).__name__})", argument="batch")
    name = next((name for name in SOURCES if name in batch), None)
    if name is None:
        names = ", ".join(map(str, batch)) or "none"
        raise UsageError(f"expected a column {', '.join(SOURCES)} (got {names})", argument="batch")
    if len(set(map(len, batch.values()))) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in batch.items())
        raise UsageError(f"expected columns of one length (got {lengths})", argument="batch")
    kept = {name: _array(values) for name, values in batch.items() if name not in MEDIA}
    if both := [one for one in made if one in kept]:
        raise UsageError(f"columns named like a result must be renamed (got {', '.join(both)})", argument="batch")
    values = batch[name].to_pylist() if hasattr(batch[name], "to_pylist") else batch[name]
    return name, [value.item() if isinstance(value, np.generic) else value for value in values], kept


def _array(values: Any) -> np.ndarray:
    return np.fromiter(values, object, len(values)) if isinstance(values, list | tuple) else np.asarray(values)


def result_columns(
    kept: Mapping[str, np.ndarray], results: Iterable[Any], row: Callable[[Any], Mapping[str, Any]],
    failed: Mapping[str, Any],
) -> dict[str, np.ndarray]:  # fmt: skip
    """The `kept` columns, those of `row(result)`, and `error`: empty, or the line of an item that failed, whose other
    values are `failed`."""
    errors, rows = [], []
    for result in results:
        bad = isinstance(result, MultimodalError)
        errors.append(str(result) if bad else "")
        rows.append(failed if bad else row(result))
    made = dict(kept)
    for name, nothing in failed.items():
        values = [one[name] for one in rows]
        column = np.array(values, np.float32 if isinstance(nothing, float | np.ndarray) else object)
        made[name] = column.reshape(-1, *np.shape(nothing))  # also without rows
    return made | {"error": np.array(errors, object)}
