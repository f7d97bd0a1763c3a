"""Resumable results file: every finished image survives an interruption.

Beside `results.csv` is `results.csv.settings.json`, which prevents mixing results of different settings, and tells
a file that was closed from one whose writer was killed."""

import csv
import fcntl
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import path_of, read_json, write_whole
from multimodal.system.signals import unbroken

STYLES = ("csv", "jsonl")
BESIDE = ".settings.json"  # ending of the file beside the results
SYNC = 5.0  # seconds of work that a power cut may lose; a kill loses nothing
AGAIN = "overwrite=True starts over, or choose another file"
TORN = 100  # lines: a quote open for longer is damage, not an interrupted write


class Results:
    """Exclusive writer of a CSV or JSON-lines file, a context manager.

    `done`: names of the finished images; relative names belong to the folder of the first run. Opening cuts off an
    image that was being written when the process was killed (in an unclosed CSV always the last image, as its number of
    rows is unknown).

    Raises UsageError for a file that cannot be written, is foreign, has other `settings` (JSON-ready; `overwrite`
    starts over), is open in another process, or is damaged."""

    def __init__(
        self, path: str | Path, style: str, columns: Sequence[str], settings: dict[str, Any], overwrite: bool = False
    ):
        if style not in STYLES:
            raise UsageError(f"{path}: expected {' or '.join(STYLES)} for results (got {style!r})")
        self.path, self.style, self.columns = path_of(path, UsageError, "results"), style, list(columns)
        self.settings = json.loads(json.dumps(settings | {"style": style, "columns": self.columns}))
        self.record = self.path.with_name(self.path.name + BESIDE)
        self.done: set[str] = set()
        self.folder, self._places = os.getcwd(), set()
        self._file: int | None = _opened(self.path)
        self._closed, self._synced = True, time.monotonic()
        try:
            self._begin(overwrite)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Results":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, file: str | Path) -> bool:
        """True if the image is finished, under any name (`a.jpg`, `./a.jpg`, `/photos/a.jpg`). Raises UsageError for a
        new relative name if names in the file are relative to another folder."""
        if os.path.abspath(file) in self._places:
            return True
        if os.getcwd() != self.folder and not os.path.isabs(file):
            raise UsageError(f"{self.path}: relative names belong to {self.folder}; run from there ({file})")
        return False

    def append(self, file: str, rows: Sequence[Sequence[Any]], record: dict[str, Any]) -> None:
        """Append one image atomically: `rows` in CSV, `record` in JSON lines. Raises UsageError, e.g. disk full."""
        data = _csv(rows) if self.style == "csv" else [json_line(record)]
        try:
            with unbroken():
                if self._closed:
                    self._keep(closed=False)
                self._write(data)
                self._add(file)
        except OSError as error:
            raise UsageError(
                f"{self.path}: cannot be written ({error.strerror}); {len(self.done)} images are saved, rerun to resume"
            ) from None

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is None:
            return
        try:
            self._sync()
            self._keep(closed=True)
        except OSError:
            pass  # results are written; the last image is repeated on resume
        finally:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def _begin(self, overwrite: bool) -> None:
        size = os.fstat(self._file).st_size
        if size and not self.record.is_file():
            _check_ours(self.path, self._file, _csv([self.columns])[0] if self.style == "csv" else b'{"file": ')
        if not size:
            self._check_beside()
        if size and not overwrite:
            self._resume()
            return
        try:
            os.ftruncate(self._file, 0)  # before the settings, which would adopt old results
            self._keep(closed=True)
            self._header()
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be written ({error.strerror})") from None

    def _header(self) -> None:
        if self.style == "csv":
            self._write(_csv([self.columns]))

    def _check_beside(self) -> None:
        """Raises UsageError for a foreign file with the name of our settings."""
        try:
            ours = not self.record.exists() or "settings" in read_json(self.record)
        except CheckpointError:
            ours = False
        if not ours:
            raise UsageError(f"{self.record}: exists and is not ours; choose another file")

    def _resume(self) -> None:
        try:
            known = read_json(self.record)
        except CheckpointError as error:
            raise UsageError(f"{self.path}: its settings cannot be read ({error}); {AGAIN}") from None
        before = known.get("settings")
        before = before if isinstance(before, dict) else {}
        if other := sorted(k for k in before.keys() | self.settings.keys() if before.get(k) != self.settings.get(k)):
            raise UsageError(f"{self.path}: was written with other {', '.join(other)}; {AGAIN}")
        self.folder = str(known.get("folder", self.folder))
        closed = known.get("closed") is True
        end = self._read(closed)
        os.ftruncate(self._file, end)
        if end == 0:
            self._header()
        if not closed:
            self._sync()
            self._keep(closed=True)  # a second kill here costs no further image

    def _read(self, closed: bool) -> int:
        """Fill `done`; return the byte where complete images end."""
        names, last, begin, end = set[str](), None, 0, 0
        with open(self.path, "rb") as file:
            for name, start, after in (_csv_rows if self.style == "csv" else _json_rows)(file, self.columns, self.path):
                end = after
                if name is not None:
                    names.add(name)
                    last, begin = name, (begin if name == last else start)
        torn = not closed or end < os.fstat(self._file).st_size
        if self.style == "csv" and torn and last is not None:
            names.remove(last)
            end = begin
        for name in names:
            self._add(name)
        return end

    def _add(self, name: str) -> None:
        self.done.add(name)
        self._places.add(os.path.normpath(os.path.join(self.folder, name)))

    def _write(self, rows: Sequence[bytes]) -> None:
        end = os.fstat(self._file).st_size
        try:
            _write_all(self._file, b"".join(rows))
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            raise
        if time.monotonic() - self._synced > SYNC:
            self._sync()

    def _keep(self, closed: bool) -> None:
        record = {"settings": self.settings, "folder": self.folder, "closed": closed}
        write_whole(self.record, (json.dumps(record, indent=1) + "\n").encode())
        self._closed = closed


def _opened(path: Path) -> int:
    """Open for appending, with an exclusive lock. Raises UsageError."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: not a regular file (folder, device, pipe or socket)")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UsageError(f"{path}: another process is writing it") from None
    except OSError:
        pass  # a file system without locks
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise UsageError(f"{path}: not a regular file")
    return file


def _check_ours(path: Path, file: int, header: bytes) -> None:
    """Raises UsageError for a foreign file, so that a wrong -o never destroys an image."""
    begin = os.pread(file, len(header), 0)
    if begin != header[: len(begin)]:
        raise UsageError(f"{path}: not a results file (it starts with {begin[:20]!r})")


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _csv(rows: Sequence[Sequence[Any]]) -> list[bytes]:
    text = io.StringIO()
    quoting = csv.QUOTE_ALL if any("\r" in str(cell) for row in rows for cell in row) else csv.QUOTE_MINIMAL
    writer = csv.writer(text, lineterminator="\n", quoting=quoting)  # csv leaves \r unquoted
    ends = list(accumulate(writer.writerow(row) for row in rows))
    whole = text.getvalue()
    parts = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [part.encode("utf-8", "surrogateescape") for part in parts]  # file names may not be UTF-8


def json_line(record: Mapping[str, Any]) -> bytes:
    """UTF-8, or ASCII with escapes for a file name that is not UTF-8."""
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def _csv_rows(file: io.BufferedIOBase, columns: list[str], path: Path) -> Iterator[tuple[str | None, int, int]]:
    """Yield (image name or None for the header, first byte, end byte) of each complete row."""
    at, count, ended = 0, 0, True

    def lines() -> Iterator[str]:
        nonlocal at, count, ended
        for line in file:
            at, count, ended = at + len(line), count + 1, line.endswith(b"\n")
            yield line.decode("utf-8", "surrogateescape")

    rows, start, first = csv.reader(lines(), strict=True), 0, 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            row = []
        if not ended or len(row) != len(columns):
            if file.read(1) or count - first > TORN:
                raise UsageError(f"{path}: line {first + 1} is damaged; {AGAIN}")
            return
        yield (row[0] if start else None), start, at
        start, first = at, count


def _json_rows(file: io.BufferedIOBase, columns: list[str], path: Path) -> Iterator[tuple[str | None, int, int]]:
    start = 0
    for number, line in enumerate(file, 1):
        try:
            name = json.loads(line)["file"] if line.endswith(b"\n") else None
        except (ValueError, TypeError, LookupError, RecursionError):
            name = None
        if not isinstance(name, str):
            if file.read(1):
                raise UsageError(f"{path}: line {number} is damaged; {AGAIN}")
            return
        yield name, start, start + len(line)
        start += len(line)
