"""Index folders with one damaged file each."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from multimodal.cli.main import main

from .rows import Row, Run


def indexed(change: Callable[[], object]) -> Callable[[], None]:
    """An index of the working folder, below `out/`, after a change."""

    def make() -> None:
        model = Path("clip").resolve()
        with pytest.raises(SystemExit, match="0"):
            main(["index", "red.png", "-o", "out/index", "-m", str(model)])
        change()

    return make


def header(old: bytes, new: bytes) -> Callable[[], None]:
    """The rows' header changed, with the time that index.json knows: then numpy is the first to read it."""

    def change() -> None:
        path = Path("out/index/vectors-1.npy")
        time = path.stat().st_mtime_ns
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new.ljust(len(old)), 1))
        os.utime(path, ns=(time, time))

    return change


def search(name: str, change: Callable[[], object], cause: str) -> Row:
    return Row(name, "search red --index out/index -m {copy:clip}", indexed(change), [re.compile(cause)],
               nothing_found)  # fmt: skip


def nothing_found(run: Run) -> None:
    assert run.out == ""


ROWS = [
    search("header that does not end", header(b"}", b"("), r"vectors-1\.npy: cannot be read"),
    search("header of another Python", header(b"False", b"0x(L"), r"vectors-1\.npy: cannot be read"),
]
