"""State of a run on disk: progress and the set of spans, in one transaction, so that a stopped run resumes."""

import json
import sqlite3
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.errors import UsageError

KIND = 0x6D6D636C  # application id of the file
TABLES = """
create table run (settings text, progress text);
create table spans (key integer primary key, file integer, line integer, a integer, b integer, c integer);
create table pages (page integer primary key, file integer, line integer, signature blob);
create table bands (key integer, page integer, primary key (key, page)) without rowid;
"""


class Place(NamedTuple):
    """A span of three sentences: the line that its page begins on, and the lines of the sentences in the page."""

    file: int
    line: int
    a: int = 1
    b: int = 1
    c: int = 1


class Near(NamedTuple):
    """A page with its signature."""

    place: Place
    signature: bytes


class State:
    """`progress`: of the last `commit` of a run with equal `settings`, or None; `resumed`: such a run left the file.
    sqlite keeps up to `memory` bytes of the tables in memory, the rest on disk. Raises UsageError for a file that is no
    state, or one in use; with `keep`, for the state of a run with other settings, else replaces it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], memory: int, keep: bool = False):
        self.path, self._settings = path, json.dumps(settings, sort_keys=True)
        try:
            self._database = sqlite3.connect(path, timeout=0, isolation_level=None)
            try:
                self._open(memory, keep)
            except BaseException:
                self._database.close()
                raise
        except sqlite3.OperationalError as error:
            cause = "in use by another process, which writes the same output" if "locked" in str(error) else error
            raise UsageError(f"{path}: {cause}") from None
        except sqlite3.DatabaseError:
            raise UsageError(f"{path}: exists and is no state of multimodal clean; move it away") from None

    def _open(self, memory: int, keep: bool) -> None:
        run = self._database.execute
        run("pragma locking_mode = exclusive")
        empty = not run("select count(*) from sqlite_master").fetchone()[0]
        if not empty and run("pragma application_id").fetchone()[0] != KIND:
            raise sqlite3.DatabaseError
        if not empty and run("select settings from run").fetchone() != (self._settings,):
            if keep:
                problem = "of a stopped run with other inputs or options; repeat these, or remove it"
                raise UsageError(f"{self.path}: {problem}")
            for (table,) in run("select name from sqlite_master where type = 'table'").fetchall():
                run(f"drop table {table}")
            empty = True
        self.resumed = not empty
        run(f"pragma cache_size = -{max(1, memory >> 10)}")
        run("pragma journal_mode = wal")
        run("pragma synchronous = normal")
        if empty:
            run(f"pragma application_id = {KIND}")
            self._database.executescript(f"begin; {TABLES} commit;")
            run("insert into run values (?, null)", (self._settings,))
        run("begin immediate")
        found = run("select progress from run").fetchone()[0]
        self.progress: dict[str, Any] | None = json.loads(found) if found else None

    def clear(self) -> None:
        """Forget all progress."""
        for table in ("spans", "pages", "bands"):
            self._database.execute(f"delete from {table}")
        self.progress = None

    def spans(self, keys: Collection[int]) -> dict[int, Place]:
        """The places of those spans that are known."""
        rows = self._database.execute(
            "select * from spans where key in (select value from json_each(?))", (str(sorted(keys)),)
        )
        return {key: Place(*place) for key, *place in rows}

    def add_spans(self, spans: Mapping[int, Place]) -> None:
        rows = sorted((key, *place) for key, place in spans.items())
        self._database.executemany("insert or ignore into spans values (?, ?, ?, ?, ?, ?)", rows)

    def near(self, bands: Collection[int]) -> list[Near]:
        """Pages with one of these bands, the first ones first."""
        rows = self._database.execute(
            "select file, line, signature from pages where page in (select page from bands where key in "
            "(select value from json_each(?))) order by page", (str(sorted(bands)),)
        )  # fmt: skip
        return [Near(Place(file, line), signature) for file, line, signature in rows]

    def add_page(self, page: Near, bands: Collection[int]) -> None:
        added = self._database.execute(
            "insert into pages (file, line, signature) values (?, ?, ?)", (*page.place[:2], page.signature)
        )
        rows = sorted((key, added.lastrowid) for key in set(bands))
        self._database.executemany("insert into bands values (?, ?)", rows)

    def commit(self, progress: Mapping[str, Any]) -> None:
        """Raises OSError where the disk is full."""
        try:
            self._database.execute("update run set progress = ?", (json.dumps(progress),))
            self._database.execute("commit")
            self._database.execute("begin immediate")
            self.progress = dict(progress)
        except sqlite3.OperationalError as error:
            raise OSError(None, f"cannot be written ({error})", str(self.path)) from None

    def close(self, remove: bool) -> None:
        """`remove`: the file too."""
        with suppress(sqlite3.Error):
            self._database.execute("rollback")
        self._database.close()
        if remove:
            self.path.unlink(missing_ok=True)
