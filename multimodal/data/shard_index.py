"""Indexes of tars: one packed row per sample, kept beside the shard and mapped, so that all processes share the memory
and a resumed run does not read the headers again.

An index is data alone: rows are JSON, checked by a checksum, and never name a file. A stale or damaged one is rebuilt;
a file that is no index is left alone, and the index goes to the cache folder, as it does where the shard's folder
cannot be written."""

import contextlib
import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multimodal.data.remote.copies import default_cache
from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import write_whole
from multimodal.system.records import from_record

MAGIC = b"multimodal-index-1\n"
HEAD = struct.Struct("<3Q")  # bytes of the facts, rows, checksum of what follows
LEAST = 1 << 21  # bytes of a shard whose index is kept; smaller ones are read in a moment
ENDING = ".index"


@dataclass(frozen=True)
class ShardFacts:
    """Facts of a shard beside its `stamp`; see `sources._packed_shard`."""

    labelled: bool
    texted: bool
    labels: list[str]
    usable: list[tuple[bool, bool]]


class ShardIndex:
    """Rows and `facts` about them. Raises ValueError for bytes that are no whole index, CheckpointError for facts of
    other types."""

    def __init__(self, data: bytes | mmap.mmap, path: Path | None = None):
        self.path, self._data = path, data
        start = len(MAGIC) + HEAD.size
        if data[: len(MAGIC)] != MAGIC or len(data) < start:
            raise ValueError("no index")
        size, count, checksum = HEAD.unpack_from(data, len(MAGIC))
        ends = start + size + 8 * (count + 1)
        if ends > len(data) or zlib.crc32(memoryview(data)[start:]) != checksum:
            raise ValueError("damaged")
        self.facts: dict[str, Any] = json.loads(data[start : start + size])
        from_record(ShardFacts, self.facts, "facts", others=True)
        self._ends = np.frombuffer(data, "<i8", count + 1, start + size)
        self._first = ends
        if len(data) != ends + int(self._ends[-1]):
            raise ValueError("damaged")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Any:
        """Return a row's JSON value."""
        first, last = (self._first + int(end) for end in self._ends[number : number + 2])
        return json.loads(self._data[first:last])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_mapped, (self.path,)) if self.path else (ShardIndex, (self._data,))


def packed(facts: dict[str, Any], rows: Sequence[bytes]) -> bytes:
    """Return the bytes of an index."""
    head = json.dumps(facts).encode()
    ends = np.cumsum([0, *map(len, rows)], dtype="<i8").tobytes()
    body = b"".join([head, ends, *rows])
    return MAGIC + HEAD.pack(len(head), len(rows), zlib.crc32(body)) + body


def shard_index(
    shard: Path, kind: Any, build: Callable[[], tuple[dict[str, Any], list[bytes]]], cache: Path | None = None
) -> ShardIndex:
    """Return the index of a shard, kept or made by `build` (facts and rows). `kind`: what else the rows depend on, as
    JSON data."""
    from filelock import FileLock

    stat = shard.stat()
    stamp = {"size": stat.st_size, "time": stat.st_mtime_ns, "kind": kind}
    made = lambda: packed(*(lambda facts, rows: (facts | {"stamp": stamp}, rows))(*build()))
    if stat.st_size < LEAST:
        return ShardIndex(made())
    places = [shard.with_name(shard.name + ENDING)]
    with contextlib.suppress(UsageError):  # no home
        places.append(_cached(shard, cache))
    if found := _kept(places, stamp):
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # one process of a machine reads the headers
            places[-1].parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(f"{places[-1]}.lock"))
        if found := _kept(places, stamp):
            return found
        data = made()
        for place in places:
            with contextlib.suppress(OSError, ValueError):
                if not place.exists() or _is_index(place):
                    write_whole(place, data)
                    return _mapped(place)
    return ShardIndex(data)


def _cached(shard: Path, cache: Path | None) -> Path:
    name = hashlib.sha256(str(shard.resolve()).encode()).hexdigest()[:16]
    return (cache or default_cache()) / f"{name}-{shard.name[-60:]}{ENDING}"


def _kept(places: Sequence[Path], stamp: dict[str, Any]) -> ShardIndex | None:
    return next((found for found in _opened(places) if found.facts.get("stamp") == stamp), None)


def _opened(places: Sequence[Path]) -> Iterator[ShardIndex]:
    for place in places:
        with contextlib.suppress(OSError, ValueError, RecursionError, CheckpointError):
            yield _mapped(place)


def _mapped(path: Path) -> ShardIndex:
    if not path.is_file():  # a pipe would wait
        raise ValueError("no index")
    with path.open("rb") as file:
        return ShardIndex(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path)


def _is_index(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
