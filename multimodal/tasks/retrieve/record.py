"""Files of an image index, and their checks against `index.json`.

    index.json         describes the other files; written last
    vectors-G.npy      one unit vector per row, memory-mapped by numpy
    images-G.jsonl     line i names the image of row i
    lines-G-N.npy      byte offset of each line, and of the end of the last
    KIND-G-N.faiss     FAISS index of the first N rows

Rows and lines are appended. Rows after the N of `index.json` are not searched yet; the next run resumes after them.
Removing rows starts a new generation G, whose files are complete before `index.json` names them."""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import parse_json, path_of, read_json, shown
from multimodal.system.records import from_record
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.video.names import FrameName

FORMAT = 1
RECORD = "index.json"
HEADER = 128  # bytes before the rows; numpy pads it, so that a larger count fits in place
BLOCK = 2048  # rows read at once: 512 numbers each fit into a second-level cache
PIECE = 1 << 22  # bytes read at once
AGAIN = "run multimodal index --overwrite to rebuild it"


@dataclass(frozen=True)
class IndexEntry:
    """Absolute path, size and modification time of an image when it was embedded; of a frame of a video also its `time`
    (seconds), the `sampling` that chose it and the number of `frames` that it chose. A whole video has no `time`."""

    file: str
    bytes: int
    mtime_ns: int
    time: float | None = None
    sampling: str | None = None
    frames: int | None = None

    @property
    def name(self) -> str:
        """The path, or the FrameName of a frame."""
        return self.file if self.time is None else FrameName(self.file, self.time)

    @property
    def state(self) -> tuple[Any, ...]:
        """File and sampling of the vector, which is out of date if they change."""
        return self.bytes, self.mtime_ns, self.sampling


@dataclass(frozen=True)
class FileFacts:
    """Size, time and hash of a file, up to the end of the committed rows."""

    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class IndexRecord:
    """`index.json`. `model` and `architecture` are arguments of `load`. `effort`: lists visited per
    query. `recall`: share of the ten nearest found, measured at build time. `files`: see `FileFacts`.
    `native`: most patches of images at their own aspect, 0: as many as the model learned; None: the preprocessing's
    size."""

    model: str
    architecture: str | None
    model_sha256: str
    preprocessing: Preprocessing
    dimension: int
    dtype: Literal["float16", "float32"]
    generation: int = 1
    count: int = 0
    kind: Literal["flat", "ivf"] = "flat"
    effort: int = 0
    recall: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)
    native: int | None = None
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
        """File names by part: vectors, images, lines, search ('' for a flat index)."""
        lines = f"lines-{self.generation}-{self.count}.npy"
        search = "" if self.kind == "flat" else f"{self.kind}-{self.generation}-{self.count}.faiss"
        return file_names(self.generation) | {"lines": lines, "search": search}


def read_index_record(folder: Path) -> IndexRecord:
    """Read `index.json`. Raises UsageError if the folder has no index, CheckpointError if it is damaged."""
    path = path_of(folder, UsageError, "index") / RECORD
    if not path.exists():
        raise UsageError(f"{folder}: holds no index (multimodal index makes one)")
    try:
        return from_record(IndexRecord, read_json(path), str(path))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {AGAIN}") from None


def check_file(folder: Path, record: IndexRecord, part: str) -> int:
    """Compare a file with the record; return its modification time in nanoseconds. Raises CheckpointError.

    The content is hashed only if the modification time differs, so gigabytes of untouched vectors are not read."""
    path = folder / record.names()[part]
    if part not in record.files:
        raise CheckpointError(f"{folder / RECORD}: has no entry for {path.name}")
    size, mtime_ns, sha256 = (getattr(record.files[part], name) for name in ("bytes", "mtime_ns", "sha256"))
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    stat = path.stat()
    if stat.st_size < size:
        raise CheckpointError(f"{path}: cut off ({stat.st_size} of {size} bytes)")
    if stat.st_mtime_ns != mtime_ns and digest(path, rows_begin(part), size) != sha256:
        raise CheckpointError(f"{path}: damaged (sha256 differs from index.json)")
    return stat.st_mtime_ns


def mapped(folder: Path, record: IndexRecord, part: str) -> np.ndarray:
    """Memory-mapped `vectors` [N D], or byte offsets of the `lines` and of the end of the last [N + 1].

    Raises CheckpointError."""
    path = folder / record.names()[part]
    lines = part == "lines"
    shape = (record.count + 1,) if lines else (record.count, record.dimension)
    dtype = np.dtype(np.int64 if lines else record.dtype)
    try:
        array = np.lib.format.open_memmap(path, "r")
    except Exception as error:  # numpy parses the header as Python: damage raises almost anything
        raise CheckpointError(f"{path}: cannot be read ({(str(error).splitlines() or ['damaged'])[0][:80]})") from None
    fits = array.ndim == len(shape) and array.shape[1:] == shape[1:] and len(array) >= shape[0]
    if not fits or array.dtype != dtype or array.offset != HEADER:
        raise CheckpointError(
            f"{path}: expected {shape} of {dtype} from byte {HEADER}, got {array.shape} of {array.dtype} from "
            f"byte {array.offset}"
        )
    return array[: shape[0]]


def read_entry(line: bytes, where: str) -> IndexEntry:
    """Parse a line of `images-G.jsonl`. Raises CheckpointError."""
    try:
        values = parse_json(line, where)
        if isinstance(values, dict) and [type(value) for value in values.values()] == [str, int, int]:
            return IndexEntry(**values)  # the check of `from_record` in a third of its time
        return from_record(IndexEntry, values, where)
    except (CheckpointError, TypeError):
        raise CheckpointError(f"{where}: damaged line ({shown(line)})") from None


def file_names(generation: int) -> dict[str, str]:
    """Names of the files that grow."""
    return {"vectors": f"vectors-{generation}.npy", "images": f"images-{generation}.jsonl"}


def rows_begin(part: str) -> int:
    """First byte that is hashed: the header of the vectors also counts uncommitted rows."""
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
    """sha256 of bytes `start` to `end`."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for at in range(start, end, PIECE):
            sha.update(file.read(min(PIECE, end - at)))
    return sha.hexdigest()
