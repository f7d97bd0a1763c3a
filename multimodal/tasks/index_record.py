"""The folder of a picture index: what is in it, and how its files are held to what `index.json` says.

    index.json         what the rest is; written last
    vectors-G.npy      a unit vector a row, for numpy's memory map
    pictures-G.jsonl   line i names the picture of row i
    lines-G-N.npy      the byte where line i begins, and the end of the last
    KIND-G-N.faiss     the search index of the first N rows

Rows and lines are appended. What lies behind the N of `index.json` is not searched yet; a second call goes on behind
it. G counts up where rows are left out: the files of the new G are whole before `index.json` names them."""

import hashlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from multimodal.errors import CheckpointError, UsageError
from multimodal.tokens.files import read_json
from multimodal.tokens.records import from_record

FORMAT = 1
RECORD = "index.json"
HEADER = 128  # bytes before the rows; numpy leaves room in it, so that it can count more rows in place
DTYPES = ("float16", "float32")
BLOCK = 2048  # rows read at once: with 512 numbers each they fit into a second-level cache
PIECE = 1 << 22  # bytes read at once
AGAIN = "run multimodal index --overwrite to make it anew"


class Entry(NamedTuple):
    """A picture as it was when its vector was made. `file` is its absolute path."""

    file: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class IndexRecord:
    """`index.json`. `model` and `architecture` are what `load` takes; the hash is of the weights. `effort`: lists (ivf)
    or candidates (hnsw) looked at for a query. `recall`: of the ten nearest, measured when the index was built.
    `files`: size, time and sha256 of each file, as far as it belongs to the first `count` rows."""

    model: str
    architecture: str | None
    model_sha256: str
    preprocessing: dict
    dimension: int
    dtype: str
    generation: int = 1
    count: int = 0
    kind: str = "flat"
    effort: int = 0
    recall: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)
    format: int = FORMAT

    @property
    def row_bytes(self) -> int:
        return self.dimension * np.dtype(self.dtype).itemsize

    def names(self) -> dict[str, str]:
        """Of the files: vectors, pictures, lines, search ('' where the kind has none)."""
        lines = f"lines-{self.generation}-{self.count}.npy"
        search = "" if self.kind == "flat" else f"{self.kind}-{self.generation}-{self.count}.faiss"
        return file_names(self.generation) | {"lines": lines, "search": search}


def read_index_record(folder: Path) -> IndexRecord:
    """Raises UsageError where there is no index, CheckpointError where `index.json` is damaged."""
    path = folder / RECORD
    if not path.exists():
        raise UsageError(f"{folder}: no index there (multimodal index PICTURES --output {folder} makes one)")
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {str(values.get('format'))[:20]!r} is not {FORMAT}")
    record = from_record(IndexRecord, values, str(path))
    if record.dtype not in DTYPES or record.dimension < 1 or record.count < 0 or record.generation < 1:
        raise CheckpointError(f"{path}: damaged (dtype {record.dtype!r:.20}, {record.count} x {record.dimension})")
    return record


def check_file(folder: Path, record: IndexRecord, part: str) -> int:
    """Holds a file to what the record says of it. The content is read where the file's time has changed: so what any
    program wrote into it is found, and an untouched file of gigabytes is not read. Returns the time, in nanoseconds.
    Raises CheckpointError."""
    path = folder / record.names()[part]
    known = record.files.get(part)
    try:
        size, seen, wanted = known["bytes"], known["mtime_ns"], known["sha256"]
    except (TypeError, KeyError):
        raise CheckpointError(f"{folder / RECORD}: says nothing of {path.name}") from None
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    stat = path.stat()
    if stat.st_size < size:
        raise CheckpointError(f"{path}: cut off ({stat.st_size} of {size} bytes)")
    if stat.st_mtime_ns != seen and digest(path, rows_begin(part), size) != wanted:
        raise CheckpointError(f"{path}: damaged (its sha256 is not that of index.json)")
    return stat.st_mtime_ns


def mapped_vectors(folder: Path, record: IndexRecord) -> Float[np.ndarray, "N D"]:
    """The rows, in the file. Raises CheckpointError."""
    path = folder / record.names()["vectors"]
    rows = mapped_array(path)
    wanted = (record.dimension, np.dtype(record.dtype))
    if rows.ndim != 2 or (rows.shape[1], rows.dtype) != wanted or len(rows) < record.count:
        raise CheckpointError(f"{path}: holds {rows.shape} of {rows.dtype}, not {record.count} x {wanted[0]}")
    return rows[: record.count]


def mapped_array(path: Path) -> np.ndarray:
    """An array that stays in its file. Raises CheckpointError."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({str(error).splitlines()[0][:80]})") from None


def read_entry(line: bytes, where: str) -> Entry:
    """Raises CheckpointError."""
    try:
        return Entry(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(f"{where}: damaged (a line is {line[:40]!r})") from None


def file_names(generation: int) -> dict[str, str]:
    """Of the files that grow."""
    return {"vectors": f"vectors-{generation}.npy", "pictures": f"pictures-{generation}.jsonl"}


def rows_begin(part: str) -> int:
    """The header counts the rows behind those of the record too."""
    return HEADER if part == "vectors" else 0


def npy_header(rows: int, record: IndexRecord) -> bytes:
    file = io.BytesIO()
    descr = np.dtype(record.dtype).newbyteorder("<").str
    np.lib.format.write_array_header_1_0(
        file, {"descr": descr, "fortran_order": False, "shape": (rows, record.dimension)}
    )
    assert len(file.getvalue()) == HEADER
    return file.getvalue()


def facts_of(path: Path, start: int, end: int | None) -> dict[str, Any]:
    stat = path.stat()
    end = stat.st_size if end is None else end
    return {"bytes": end, "mtime_ns": stat.st_mtime_ns, "sha256": digest(path, start, end)}


def digest(path: Path, start: int, end: int) -> str:
    """sha256 of the bytes from `start` to `end`."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for at in range(start, end, PIECE):
            sha.update(file.read(min(PIECE, end - at)))
    return sha.hexdigest()
