"""JSON records as frozen dataclasses, checked strictly.

The dataclass declares keys and types; its `__post_init__` checks values and raises MultimodalError or ValueError."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any

from multimodal.errors import CheckpointError, MultimodalError
from multimodal.system.files import shown

_MOST_INT = 2**64  # torch, numpy and Rust hold no larger number


def to_record(value: Any) -> Any:
    """A nested dataclass as JSON data."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_record(item) for key, item in value.items()}
    return [to_record(item) for item in value] if isinstance(value, tuple | list) else value


def from_record(
    kind: type, record: Any, where: str, error: type[MultimodalError] = CheckpointError, others: bool = False
) -> Any:
    """Build the dataclass `kind` from `record`. `others`: ignore unknown keys.

    Raises `error` with `where`, the key, the expected type and the value."""
    if not isinstance(record, dict):
        raise error(f"{where}: expected an object for {kind.__name__} ({shown(record)})")
    hints, needed = _hints(kind)
    for key in record:
        if key not in hints and not others:
            raise error(f"{where}: unknown key {shown(key)} for {kind.__name__}")
    if missing := [name for name in needed if name not in record]:
        raise error(f"{where}: missing key {missing[0]!r} for {kind.__name__}")
    values = {key: checked(hints[key], record[key], f"{where}: {key}", error) for key in hints if key in record}
    try:
        return kind(**values)
    except (MultimodalError, ValueError, TypeError, ArithmeticError) as cause:
        text = str(cause)
        raise error(text if text.startswith(where) else f"{where}: {text}") from None


@functools.cache
def _hints(kind: type) -> tuple[dict[str, Any], list[str]]:
    """Type of each key, and the required keys."""
    fields, none = dataclasses.fields(kind), dataclasses.MISSING
    hints = typing.get_type_hints(kind)
    needed = [field.name for field in fields if field.default is none and field.default_factory is none]
    return {field.name: hints[field.name] for field in fields}, needed


def checked(hint: Any, item: Any, where: str, error: type[MultimodalError] = CheckpointError) -> Any:
    """`item` as the type `hint`: a dataclass, tuple, list, dict, Literal, union, bool, int, float, str, None or Any.
    Ints become floats, bools do not become ints, floats must be finite. Raises `error`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType) or origin is typing.Union:
        return _one_of(parts, item, where, error)
    if dataclasses.is_dataclass(hint):
        return from_record(hint, item, where, error)
    if origin is tuple or origin is list:
        return _listed(origin, parts, item, where, error)
    if origin is dict:
        if not isinstance(item, dict):
            raise error(f"{where}: expected an object ({shown(item)})")
        return {key: checked(parts[1], value, f"{where}: {shown(key)}", error) for key, value in item.items()}
    if hint is Any or (origin is typing.Literal and type(item) in (str, int, bool) and item in parts):
        return item
    if hint is float and type(item) is int and abs(item) < _MOST_INT:
        return float(item)
    too_large = (hint is int and type(item) is int and abs(item) >= _MOST_INT) or (
        hint is float and type(item) is float and not math.isfinite(item)
    )
    if type(item) is not hint or too_large:
        raise error(f"{where}: expected {_name(hint)} ({shown(item)})")
    return item


def _one_of(parts: tuple[Any, ...], item: Any, where: str, error: type[MultimodalError]) -> Any:
    fits = [part for part in parts if _looks_like(part, item)]
    if not fits:
        raise error(f"{where}: expected {' or '.join(map(_name, parts))} ({shown(item)})")
    if len(fits) > 1 and dataclasses.is_dataclass(fits[0]):  # the one that has the item's keys
        fits.sort(key=lambda part: len(item.keys() - {field.name for field in dataclasses.fields(part)}))
    return checked(fits[0], item, where, error)


def _looks_like(hint: Any, item: Any) -> bool:
    """Return True if `item` selects this part of a union; its inner values may still be wrong."""
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return type(item) is str
    if dataclasses.is_dataclass(hint):
        origin = dict
    return type(item) in {tuple: (list, tuple), float: (float, int)}.get(origin, (origin,))


def _listed(
    origin: type, parts: tuple[Any, ...], item: Any, where: str, error: type[MultimodalError]
) -> tuple[Any, ...] | list[Any]:
    if not isinstance(item, list | tuple):
        raise error(f"{where}: expected a list ({shown(item)})")
    if origin is list or parts[-1] is Ellipsis:
        parts = parts[:1] * len(item)
    if len(item) != len(parts):
        raise error(f"{where}: expected {len(parts)} values ({shown(item)})")
    pairs = enumerate(zip(parts, item, strict=True))
    return origin(checked(part, value, f"{where}[{i}]", error) for i, (part, value) in pairs)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    kinds = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object",
             list: "a list", tuple: "a list"}  # fmt: skip
    if hint in (None, type(None)):
        return "null"
    return "an object" if dataclasses.is_dataclass(hint) else kinds.get(typing.get_origin(hint) or hint, str(hint))
