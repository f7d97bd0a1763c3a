"""Writer of an image index (`record.py` describes the files)."""

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from multimodal.errors import CheckpointError, MultimodalError, UsageError
from multimodal.system.files import write_whole
from multimodal.system.records import to_record
from multimodal.tasks.retrieve.record import (
    AGAIN,
    BLOCK,
    HEADER,
    PIECE,
    RECORD,
    IndexEntry,
    IndexRecord,
    check_file,
    facts_of,
    file_names,
    npy_header,
    read_entry,
    read_index_record,
    rows_begin,
)
from multimodal.tokens.image.preprocessing import Preprocessing

SYNC = 5.0  # seconds of work that a power cut may lose; a kill loses nothing
# files of an index; others in its folder stay
GROWN = r"(vectors-\d+\.npy|images-\d+\.jsonl|lines-\d+-\d+\.npy|ivf-\d+-\d+\.faiss)(\.part)?"
MADE = re.compile(rf"({GROWN}|search\.part|index\.json\.\w+\.part)")
_SAME = ("model_sha256", "dimension", "preprocessing", "dtype", "native")


def note_times(folder: Path, record: IndexRecord, times: dict[str, int]) -> None:
    """Store modification times of verified files, so that a copied folder is hashed only once."""
    if all(record.files[part].mtime_ns == time_ns for part, time_ns in times.items()):
        return
    with suppress(MultimodalError, OSError):  # the folder is read-only or being written
        with _locked(folder):
            found = read_index_record(folder)
            if all(found.files[part].sha256 == record.files[part].sha256 for part in times):
                files = found.files | {part: replace(found.files[part], mtime_ns=at) for part, at in times.items()}
                _write_record(folder, replace(found, files=files))


class IndexWriter:
    """Exclusive writer of an index folder, a context manager. `entries`: row and entry of each image or
    frame, by name.

    Raises UsageError for a folder that holds other files, is open in another process, or belongs to another model
    (unless `overwrite`, which starts over); CheckpointError for damage."""

    def __init__(self, folder: Path, expected: IndexRecord, overwrite: bool = False):
        self.folder, locked_before = folder, (folder / "lock").exists()
        self._lock = _locked(folder)
        self._vectors: Any = None
        self._lines: Any = None
        try:
            self.record = self._begun(expected, overwrite)
            self.rows, self.entries = 0, {}
            self._open()
        except BaseException:
            self.close()
            if not locked_before:  # a folder of something else stays as it was
                (folder / "lock").unlink(missing_ok=True)
            raise

    def __enter__(self) -> "IndexWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in (self._vectors, self._lines, self._lock):
            if file is not None:
                with suppress(OSError):  # `append` raised it, or has flushed all
                    file.close()

    def append(self, entries: Sequence[IndexEntry], vectors: Float[np.ndarray, "B D"]) -> None:
        """Append rows, then lines: the next run cuts off a row without a line; a line without a row would be wrong."""
        if not entries:
            return
        lines = "".join(map(_line, entries)).encode()
        for file, data in ((self._vectors, _bytes(vectors, self.record.dtype)), (self._lines, lines)):
            file.write(data)
            file.flush()
        for entry in entries:
            self.entries[entry.name] = (self.rows, entry)
            self.rows += 1
        if time.monotonic() - self._synced > SYNC:
            self._sync()

    def keep(self, rows: Int[np.ndarray, "K"]) -> None:
        """Drop all other rows by writing the next generation."""
        old, new = self._paths(), {k: self.folder / v for k, v in file_names(self._generation + 1).items()}
        self._sync()
        vectors = self._mapped()
        with _part(new["vectors"]).open("wb") as file:
            file.write(npy_header(len(rows), self.record))
            for start in range(0, len(rows), BLOCK):
                file.write(_bytes(vectors[rows[start : start + BLOCK]], self.record.dtype))
            _flush(file)
        lines = old["images"].read_bytes().splitlines(keepends=True)
        with _part(new["images"]).open("wb") as file:
            file.writelines(lines[row] for row in rows)
            _flush(file)
        for part in ("vectors", "images"):  # the second completes the generation
            _part(new[part]).replace(new[part])
        self._open()

    def commit(self, kind: str, effort: int, recall: dict[str, Any], search: Path | None) -> IndexRecord:
        """Commit all rows. `search`: a finished FAISS file, moved into place."""
        self._sync()
        paths, old = self._paths(), self.record
        with paths["vectors"].open("r+b") as file:  # last: readers of the old count accept a larger one
            file.write(npy_header(self.rows, self.record))
            _flush(file)
        record = replace(old, generation=self._generation, count=self.rows, kind=kind, effort=effort, recall=recall)
        paths["lines"] = self.folder / record.names()["lines"]
        _write_array(paths["lines"], _starts(paths["images"]))
        if search is not None:
            paths["search"] = self.folder / record.names()["search"]
            search.replace(paths["search"])
        ends = {"vectors": HEADER + self.rows * record.row_bytes}
        facts = {part: facts_of(path, rows_begin(part), ends.get(part)) for part, path in paths.items()}
        self.record = replace(record, files=facts)
        _write_record(self.folder, self.record)
        self._tidy()
        return self.record

    @property
    def extended(self) -> bool:
        """True if the committed rows are unchanged and first."""
        return self._generation == self.record.generation

    @property
    def unchanged(self) -> bool:
        return self.extended and self.rows == self.record.count

    def vectors(self) -> Float[np.ndarray, "N D"]:
        """All rows, memory-mapped."""
        self._sync()
        return self._mapped()

    def _mapped(self) -> Float[np.ndarray, "N D"]:
        shape = (self.rows, self.record.dimension)
        if not self.rows:  # an empty file cannot be mapped
            return np.zeros(shape, self.record.dtype)
        return np.memmap(self._paths()["vectors"], self.record.dtype, "r", HEADER, shape)

    def _paths(self) -> dict[str, Path]:
        return {part: self.folder / name for part, name in file_names(self._generation).items()}

    def _begun(self, expected: IndexRecord, overwrite: bool) -> IndexRecord:
        """The existing record if it matches, else a new one."""
        path = self.folder / RECORD
        if path.exists() and not overwrite:
            found = read_index_record(self.folder)
            self._check(found, expected)
            return found
        if not path.exists() and (others := self._others()):
            raise UsageError(f"{self.folder}: has other files and no index ({others[0]}); choose a new folder")
        self.record = replace(expected, generation=self._newest(0) + 1)
        _write_record(self.folder, self.record)
        return self.record

    def _others(self) -> list[str]:
        names = (path.name for path in self.folder.iterdir())
        return sorted(name for name in names if name != "lock" and not name.startswith(f"{RECORD}."))

    def _check(self, found: IndexRecord, expected: IndexRecord) -> None:
        for name in _SAME:
            ours, theirs = getattr(expected, name), getattr(found, name)
            if ours != theirs and isinstance(ours, Preprocessing):
                key = next(key for key in vars(ours) if getattr(ours, key) != getattr(theirs, key))
                name, ours, theirs = f"{name} {key}", getattr(ours, key), getattr(theirs, key)
            if ours != theirs:
                raise UsageError(
                    f"{self.folder}: was built with model {found.model} ({name} {_short(theirs)}, not {_short(ours)}); "
                    "choose another folder; overwrite=True replaces this one"
                )
        for part in ("vectors", "images") if found.count else ():
            try:
                check_file(self.folder, found, part)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {AGAIN}") from None

    def _newest(self, least: int) -> int:
        """Highest complete generation."""
        found = [path.stem.rpartition("-")[2] for path in self.folder.glob("images-*.jsonl")]
        return max([int(text) for text in found if text.isdecimal()] + [least])

    def _open(self) -> None:
        """Open the newest generation for appending."""
        self._generation = self._newest(self.record.generation)
        paths = self._paths()
        if not paths["images"].exists():
            paths["vectors"].write_bytes(npy_header(0, self.record))
            paths["images"].touch()
        for file in (self._vectors, self._lines):
            if file is not None:
                file.close()
        self._recover(paths)
        self._vectors, self._lines = (paths[part].open("ab") for part in ("vectors", "images"))
        self._synced = time.monotonic()

    def _recover(self, paths: dict[str, Path]) -> None:
        """Truncate what an interrupted process left incomplete."""
        committed = self.record.count if self._generation == self.record.generation else 0
        room = (paths["vectors"].stat().st_size - HEADER) // self.record.row_bytes
        found, end = _read_entries(paths["images"], max(room, 0))
        self.rows = len(found)
        vectors = self._mapped()
        for start in range(committed, len(found), BLOCK):  # zeros after a power cut
            norms = np.linalg.norm(np.asarray(vectors[start : start + BLOCK], np.float32), axis=1)
            if not (good := abs(norms - 1) < 0.01).all():
                self.rows = start + int(good.argmin())
                end -= sum(len(_line(entry)) for entry in found[self.rows :])
                break
        if self.rows < committed:
            raise CheckpointError(f"{paths['images']}: expected {committed} images (got {self.rows}); {AGAIN}")
        del vectors
        for part, size in (("vectors", HEADER + self.rows * self.record.row_bytes), ("images", end)):
            if paths[part].stat().st_size != size:  # truncating a complete file would change its time
                os.truncate(paths[part], size)
        self.entries = {entry.name: (row, entry) for row, entry in enumerate(found[: self.rows])}

    def _sync(self) -> None:
        for file in (self._vectors, self._lines):
            os.fsync(file.fileno())
        self._synced = time.monotonic()

    def _tidy(self) -> None:
        """Remove files of other generations and counts, and parts."""
        own = {*self.record.names().values(), RECORD, "lock"}
        for path in self.folder.iterdir():
            if MADE.fullmatch(path.name) and path.name not in own:
                path.unlink()


def _write_record(folder: Path, record: IndexRecord) -> None:
    write_whole(folder / RECORD, (json.dumps(to_record(record), indent=1) + "\n").encode())


def _locked(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # a link would lead our writing out of the folder, a pipe would wait
            if (MADE.fullmatch(path.name) or path.name == "lock") and not stat.S_ISREG(path.lstat().st_mode):
                raise UsageError(f"{path}: expected a regular file (link, folder, device, pipe or socket)")
        file = (folder / "lock").open("a")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(f"{folder}: another process is writing this index") from None
    return file


def _read_entries(path: Path, most: int) -> tuple[list[IndexEntry], int]:
    """The first complete lines, at most `most`, and the byte where they end."""
    entries, end = [], 0
    with path.open("rb") as file:
        for line in file:
            try:
                entry = read_entry(line, path.name)
            except CheckpointError:
                break
            if len(entries) == most or not line.endswith(b"\n"):
                break
            entries.append(entry)
            end += len(line)
    return entries, end


def _line(entry: IndexEntry) -> str:
    known = {name: value for name, value in vars(entry).items() if value is not None}
    return json.dumps(known) + "\n"  # ASCII: names that are not UTF-8 stay lone surrogates


def _bytes(vectors: Float[np.ndarray, "B D"], dtype: str) -> memoryview:
    return np.ascontiguousarray(vectors, dtype).data.cast("B")


def _starts(path: Path) -> Int[np.ndarray, "L"]:
    starts = [np.zeros(1, np.int64)]
    with path.open("rb") as file:
        at = 0
        while piece := file.read(PIECE):
            starts.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == 10) + at + 1)
            at += len(piece)
    return np.concatenate(starts)


def _write_array(path: Path, values: np.ndarray) -> None:
    with _part(path).open("wb") as file:
        np.save(file, values, allow_pickle=False)
        _flush(file)
    _part(path).replace(path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _short(value: Any) -> str:
    return str(value)[:12] + "…" if isinstance(value, str) and len(value) > 12 else str(value)[:60]
