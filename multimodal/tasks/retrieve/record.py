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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import parse_json, path_of, read_json, shown
from multimodal.system.records import from_record
from multimodal.tokens.image.preprocessing import Preprocessing

FORMAT = 1
RECORD = "index.json"
HEADER = 128  # bytes before the rows; numpy leaves room in it, so that it can count more rows in place
DTYPES = ("float16", "float32")
BLOCK = 2048  # rows read at once: with 512 numbers each they fit into a second-level cache
PIECE = 1 << 22  # bytes read at once
AGAIN = "run multimodal index --overwrite to rebuild it"


@dataclass(frozen=True)
class Entry:
    """An image as it was when its vector was made. `file` is its absolute path."""

    file: str
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class FileFacts:
    """A file of the folder, as far as it belongs to the rows of the record."""

    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class IndexRecord:
    """`index.json`. `model` and `architecture` are what `load` takes; the hash is of the weights. `effort`: lists (ivf)
    or candidates (hnsw) looked at for a query. `recall`: of the ten nearest, measured when the index was built.
    `files`: size, time and sha256 of each file, as far as it belongs to the first `count` rows."""

    model: str
    architecture: str | None
    model_sha256: str
    preprocessing: Preprocessing
    dimension: int
    dtype: Literal["float16", "float32"]
    generation: int = 1
    count: int = 0
    kind: Literal["flat", "ivf", "hnsw"] = "flat"
    effort: int = 0
    recall: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        limits = {"dimension": (1, 1 << 20), "generation": (1, 1 << 40), "count": (0, 1 << 40), "effort": (0, 1 << 20)}
        for name, (least, most) in limits.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise CheckpointError(f"{name}: expected a number from {least} to {most} ({value})")
        if self.format != FORMAT:
            raise CheckpointError(f"format: expected {FORMAT} ({self.format})")

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
    path = path_of(folder, UsageError, "index") / RECORD
    if not path.exists():
        raise UsageError(f"{folder}: no index there (multimodal index PICTURES --output {folder} makes one)")
    return from_record(IndexRecord, read_json(path), str(path))


def check_file(folder: Path, record: IndexRecord, part: str) -> int:
    """Holds a file to what the record says of it. The content is read where the file's time has changed: so what any
    program wrote into it is found, and an untouched file of gigabytes is not read. Returns the time, in nanoseconds.
    Raises CheckpointError."""
    path = folder / record.names()[part]
    if part not in record.files:
        raise CheckpointError(f"{folder / RECORD}: says nothing of {path.name}")
    size, seen, wanted = (getattr(record.files[part], name) for name in ("bytes", "mtime_ns", "sha256"))
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
    if rows.offset != HEADER:
        raise CheckpointError(f"{path}: its rows begin at byte {rows.offset}, not {HEADER}")
    if rows.ndim != 2 or (rows.shape[1], rows.dtype) != wanted or len(rows) < record.count:
        raise CheckpointError(f"{path}: holds {rows.shape} of {rows.dtype}, not {record.count} x {wanted[0]}")
    return rows[: record.count]


def mapped_array(path: Path) -> np.memmap:
    """An array that stays in its file. Raises CheckpointError."""
    try:
        return np.lib.format.open_memmap(path, "r")
    except Exception as error:  # numpy parses the header as Python; damage shows as almost any exception of that
        raise CheckpointError(f"{path}: cannot be read ({(str(error).splitlines() or ['damaged'])[0][:80]})") from None


def mapped_lines(folder: Path, record: IndexRecord) -> Int[np.ndarray, "L"]:
    """The byte where each line begins, and the end of the last, in the file. Raises CheckpointError."""
    path = folder / record.names()["lines"]
    starts = mapped_array(path)
    if starts.ndim != 1 or starts.dtype != np.int64 or len(starts) <= record.count:
        raise CheckpointError(f"{path}: holds {starts.shape} of {starts.dtype}, not {record.count + 1} of int64")
    return starts


def read_entry(line: bytes, where: str) -> Entry:
    """Raises CheckpointError."""
    try:
        values = parse_json(line, where)
        if isinstance(values, dict) and [type(value) for value in values.values()] == [str, int, int]:
            return Entry(**values)  # as `from_record` checks it, in a third of its time
        return from_record(Entry, values, where)
    except (CheckpointError, TypeError):
        raise CheckpointError(f"{where}: damaged (a line is {shown(line)})") from None


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


def facts_of(path: Path, start: int, end: int | None) -> FileFacts:
    stat = path.stat()
    end = stat.st_size if end is None else end
    return FileFacts(end, stat.st_mtime_ns, digest(path, start, end))


def digest(path: Path, start: int, end: int) -> str:
    """sha256 of the bytes from `start` to `end`."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for at in range(start, end, PIECE):
            sha.update(file.read(min(PIECE, end - at)))
    return sha.hexdigest()
