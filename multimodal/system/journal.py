"""Journals: what a long task has finished, on disk as it comes, so that a later call goes on from there."""

import json
import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import UsageError
from multimodal.system.files import append_whole
from multimodal.system.locks import lock, unlock
from multimodal.system.signals import unbroken

FORMAT = "multimodal journal"
BEGIN = f'{{"{FORMAT}": 1, '.encode()  # every journal begins so
Records = dict[str, list[Any]]


class Journal:
    """JSON lines in `path`: one with `settings`, then one for each record, [name, value].

    `records`: those of an earlier call with equal settings, by name; with others the first record overwrites the
    file. A line that a kill cut short is dropped. `path`.lock keeps other processes out until `close`.

    Raises UsageError for a file that is no journal, one in use, and a path that cannot be written."""

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        self.path, self.count = path, 0
        self._head = BEGIN + json.dumps(settings, sort_keys=True).removeprefix("{").encode() + b"\n"
        self._lock = lock(path, path.with_name(f"{path.name}.lock"))
        try:
            self.records, self._size = self._read()
        except BaseException:
            unlock(self._lock)
            raise

    def _read(self) -> tuple[Records, int]:
        """The records, and the bytes of the lines that hold them; 0 if the file must be overwritten."""
        try:
            exists = os.path.lexists(self.path)
            if exists and not stat.S_ISREG(self.path.lstat().st_mode):  # a link would lead elsewhere, a pipe would wait
                raise UsageError(f"{self.path}: exists and is not a regular file; move it away")
            data = self.path.read_bytes() if exists else b""
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror})") from None
        if not data.startswith(BEGIN) and not BEGIN.startswith(data):
            raise UsageError(f"{self.path}: exists and is no journal of multimodal; move it away")
        records, size = defaultdict(list), 0
        head, *lines = data.splitlines(keepends=True) or [b""]
        if head != self._head:
            return records, 0
        size = len(head)
        for line in lines:
            try:
                name, value = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                break
            if not line.endswith(b"\n") or not isinstance(name, str):
                break
            records[name].append(value)
            size, self.count = size + len(line), self.count + 1
        return records, size

    def add(self, name: str, value: Any) -> None:
        """Raises UsageError if the record cannot be written; those before it stay."""
        line = json.dumps([name, value]).encode() + b"\n"
        data = line if self._size else self._head + line
        try:
            with unbroken():
                append_whole(self.path, data, self._size)
        except OSError as error:
            kept = f"; {self.count} records are kept" if self.count else ""
            raise UsageError(f"{self.path}: cannot be written ({error.strerror}{kept})") from None
        self._size, self.count = self._size + len(data), self.count + 1

    def close(self, finished: bool) -> None:
        """Let others in. `finished`: remove the journal."""
        if finished:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        unlock(self._lock)


class JournalPart(NamedTuple):
    """The records of one name in a journal. Without a journal nothing is kept."""

    journal: Journal | None = None
    name: str = ""

    def part(self, name: object) -> "JournalPart":
        return self._replace(name=f"{self.name}/{name}" if self.name else str(name))

    @property
    def records(self) -> list[Any]:
        return self.journal.records[self.name] if self.journal is not None else []

    def add(self, value: Any) -> None:
        if self.journal is not None:
            self.journal.add(self.name, value)


NO_JOURNAL = JournalPart()
