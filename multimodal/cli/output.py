"""Results on stdout, errors and progress on stderr, safe for a terminal."""

import math
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

FLAGS: dict[str, str] = {}  # spelling of each argument of the running command


def fail(error: object) -> int:
    """Print one line on stderr; return the exit code 1."""
    print(f"multimodal: error: {printable(' '.join(in_flags(error).split()))}", file=sys.stderr)
    return 1


def in_flags(message: object) -> str:
    """An error or warning of the library as a command prints it: the argument at fault by its flag, `overwrite=True` as
    `--overwrite` and `scores='sigmoid'` as `--scores sigmoid`."""
    text, argument = str(message), getattr(message, "argument", None)
    if argument in FLAGS:
        text = FLAGS[argument] + text[len(argument) :]

    def spelled(match: re.Match) -> str:
        name, value = match.groups()
        if name not in FLAGS:
            return match[0]
        return FLAGS[name] if value == "True" else f"{FLAGS[name]} {value[1:-1]}"

    return re.sub(r"\b([A-Za-z]\w*)=(True|'[^' ]*')", spelled, text)


def printable(text: str) -> str:
    """The text with what would break a line or steer a terminal as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_results(results: list, rows: Iterator[list], header: list[str], style: str) -> None:
    """A table for people, CSV, JSON or JSON lines."""
    if style == "json":
        print_json(results)
    elif style == "jsonl":
        for result in results:
            print_json(result, indent=None)
    elif style == "csv":
        import csv  # slow: not for --help

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


def print_json(value: Any, indent: int | None = 1) -> None:
    """Letters as they are where the terminal or file takes every one, else as JSON's escapes."""
    import json  # slow: not for --help

    encoding = str(getattr(sys.stdout, "encoding", None)).lower().replace("-", "")
    print(json.dumps(value, ensure_ascii=encoding != "utf8", indent=indent))


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
