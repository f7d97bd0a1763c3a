"""Frozen configuration values to and from plain JSON data, strictly: an unknown or missing key is an error."""

import dataclasses
import types
import typing
from typing import Any

from multimodal.errors import CheckpointError


def to_record(value: Any) -> Any:
    """A (nested) dataclass as dicts, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_record(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [to_record(item) for item in value] if isinstance(value, tuple | list) else value


def from_record(kind: type, record: Any, where: str) -> Any:
    """Builds the dataclass `kind` from `record`. Raises CheckpointError naming `where` and the key."""
    if not isinstance(record, dict):
        raise CheckpointError(f"{where}: expected an object for {kind.__name__} ({record!r})")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in record:
        if key not in fields:
            raise CheckpointError(f"{where}: unknown key {key!r} for {kind.__name__}")
    missing = [name for name, field in fields.items() if name not in record and not _has_default(field)]
    if missing:
        raise CheckpointError(f"{where}: missing key {missing[0]!r} for {kind.__name__}")
    return kind(**{key: _value(hints[key], item, f"{where}: {key}") for key, item in record.items()})


def _has_default(field: dataclasses.Field) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _value(hint: Any, item: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if item is None and type(None) in hint.__args__:
            return None
        (hint,) = [part for part in hint.__args__ if part is not type(None)]
    if dataclasses.is_dataclass(hint):
        return from_record(hint, item, where)
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is Ellipsis and isinstance(item, list | tuple):
            parts = parts[:1] * len(item)
        if not isinstance(item, list | tuple) or len(item) != len(parts):
            raise CheckpointError(f"{where}: expected {len(parts)} values ({item!r})")
        return tuple(_value(part, value, where) for part, value in zip(parts, item, strict=True))
    if hint is float and isinstance(item, int) and not isinstance(item, bool):
        return float(item)
    if not isinstance(item, hint) or (hint is int and isinstance(item, bool)):
        raise CheckpointError(f"{where}: expected {hint.__name__} ({item!r})")
    return item
