"""Rows of bad input, their commands and shared expectations."""

import hashlib
import json
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimodal.cli.main import main

HASHED = 1 << 20  # bytes; larger files are compared by size and time
QUIET = (
    DeprecationWarning,
    PendingDeprecationWarning,
    ImportWarning,
    ResourceWarning,
)  # hidden by default


@dataclass(frozen=True)
class Run:
    """The finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Row:
    """One bad input; the format is in the package's docstring."""

    name: str
    command: str | Sequence[object]
    make: Callable[[], object] | None = None
    errors: Sequence[str | re.Pattern] = ()
    facts: Callable[[Run], object] | None = None
    code: int | None = None
    writes: Sequence[str] = ()  # globs below the working folder, beside out/


def arguments(row: Row, models: Path) -> list[str]:
    """The command's words; `{name}` is a shared model, `{copy:name}` a copy of it in the working folder."""
    words = shlex.split(row.command) if isinstance(row.command, str) else [str(word) for word in row.command]
    made = []
    for word in words:
        for copied in re.findall(r"\{copy:(\w+)\}", word):
            shutil.copytree(models / copied, copied, dirs_exist_ok=True)
        word = re.sub(r"\{copy:(\w+)\}", r"\1", word)
        made.append(re.sub(r"\{(\w+)\}", lambda m: str(models / m[1]) if (models / m[1]).exists() else m[0], word))
    return made


def execute(words: list[str], output: Callable[[], Any]) -> Run:
    """`output` gives what stdout and stderr got, of the process and of what it started."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for category in QUIET:
            warnings.simplefilter("ignore", category)
        try:
            main(words)
            raise AssertionError("main returned")
        except SystemExit as stop:
            code = stop.code or 0
    captured = output()
    return Run(code, captured.out, captured.err)


def check(row: Row, run: Run) -> None:
    lines = run.err.splitlines()
    assert "Traceback" not in run.err, run.err
    assert run.code == (row.code if row.code is not None else int(bool(row.errors))), run.err
    assert len(lines) == len(row.errors), run.err
    for line, expected in zip(lines, row.errors, strict=True):
        if isinstance(expected, re.Pattern):
            assert expected.search(line), line
        else:
            assert line in (f"multimodal: error: {expected}", expected)
    if row.facts:
        row.facts(run)


def listing(root: Path, without: Sequence[str] = ()) -> dict[str, tuple]:
    """Kind, size, time, inode, and sha256 or link target of every path below `root`."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if any(path.relative_to(root).match(glob) or name.startswith(f"{glob}/") for glob in without):
            continue
        facts = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink() and facts.st_size <= HASHED:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        time = 0 if path.is_dir() else facts.st_mtime_ns  # a folder's time changes with a temporary file in it
        found[name] = (facts.st_mode, 0 if path.is_dir() else facts.st_size, time, facts.st_ino, content)
    return found


def prints(*parts: str) -> Callable[[Run], None]:
    """Each part is on stdout: the good neighbours' results."""

    def fact(run: Run) -> None:
        assert [part for part in parts if part not in run.out] == [], run.out

    return fact


def wrote(*names: str) -> Callable[[Run], None]:
    """Exactly these files are in `out/`."""

    def fact(_: Run) -> None:
        assert sorted(str(p.relative_to("out")) for p in Path("out").rglob("*") if p.is_file()) == sorted(names)

    return fact


def silent(run: Run) -> None:
    """Nothing on stdout, nothing in `out/`."""
    assert run.out == ""
    assert list(Path("out").iterdir()) == []
