"""What several commands share: files named by arguments, progress, results on stdout."""

import csv
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from multimodal.cli import fail, printable
from multimodal.errors import MultimodalError, UsageError


def found_files(arguments: list[str], find: Callable[[list[str]], list[Path]]) -> tuple[list[Path], int]:
    """The files that the arguments name, each once; an argument that names none is reported, the others go on."""
    files: dict[Path, None] = {}
    code = 0
    for argument in arguments:
        try:
            files |= dict.fromkeys(find([argument]))
        except UsageError as error:
            code = fail(error)
    return list(files), code


def in_batches(
    files: list[Path], work: Callable[[list[Path]], list], batch_size: int, error_class: type[MultimodalError]
) -> tuple[list, int]:
    """`work` over batches; where one fails its files are taken one by one, so that the others still get a result."""
    results, code = [], 0
    for start in range(0, len(files), batch_size):
        batch = files[start : start + batch_size]
        try:
            results += work(batch)
            continue
        except error_class:
            pass
        for file in batch:
            try:
                results += work([file])
            except error_class as error:
                code = fail(error)
    return results, code


def read_lines(path: str, flag: str) -> list[str]:
    """The lines of a text file that a flag names. Raises UsageError."""
    if not path or (Path(path).exists() and not Path(path).is_file()):
        raise UsageError(f"{flag} {path!r}: not a regular file (folders, pipes and devices are not read)")
    try:
        return Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also cut at U+2028
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UsageError(f"{flag} {path}: is not UTF-8 text (byte {error.start} is {byte:#x})") from None


def print_results(results: list, rows: Iterator[list], header: list[str], style: str) -> None:
    """A table for people, CSV or JSON."""
    if style == "json":
        print_json(results)
    elif style == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    else:
        last = None
        for file, text, score in rows:
            if file != last:
                print(printable(str(file)))
            print(f"  {score:8.4f}  {printable(text)}")
            last = file


def print_json(value: Any) -> None:
    """Letters as they are where the terminal or file takes every one, else as JSON's escapes."""
    encoding = str(getattr(sys.stdout, "encoding", None)).lower().replace("-", "")
    print(json.dumps(value, ensure_ascii=encoding != "utf8", indent=1))


class Progress:
    """One line on a terminal's stderr, twice a second."""

    def __init__(self, name: str):
        self.name, self.shown = printable(name), None if sys.stderr is not None and sys.stderr.isatty() else math.inf

    def __call__(self, done: int, items: int, broken: int | None = None) -> None:
        if self.shown is None or time.monotonic() - self.shown > 0.5:
            faults = f", {broken} broken" if broken is not None else ""
            print(f"\r{self.name}: {done} of {items}{faults}\x1b[K", end="", file=sys.stderr, flush=True)
            self.shown = time.monotonic()

    def clear(self) -> None:
        if self.shown not in (None, math.inf):
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
