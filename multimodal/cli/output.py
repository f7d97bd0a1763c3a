"""Results on stdout, errors and progress on stderr, safe for a terminal."""

import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multimodal.system.files import printable, say
from multimodal.system.outputs import write_output

FLAGS: dict[str, str] = {}  # spelling of each argument of the running command


def fail(error: object) -> int:
    """Print one line on stderr; return the exit code 1."""
    say(f"multimodal: error: {printable(' '.join(in_flags(error).split()))}")
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


def six_digits(value: float) -> float:
    """Round to what float32 has."""
    return float(f"{value:.6g}")


def plain(text: str) -> str:
    """Line breaks and tabs as they are; what else would steer a terminal as escapes."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def print_record(style: str, record: Any, lines: Iterable[str]) -> None:
    """One result: as JSON, or as lines for people."""
    if style == "json":
        print_json(record)
    else:
        for line in lines:
            print(printable(line))
    sys.stdout.flush()


def print_json(value: Any, indent: int | None = 1) -> None:
    """Letters as they are where the terminal or file takes every one, else as JSON's escapes."""
    import json  # slow: not for --help

    encoding = str(getattr(sys.stdout, "encoding", None)).lower().replace("-", "")
    print(json.dumps(value, ensure_ascii=encoding != "utf8", indent=indent))


@contextmanager
def written_to(path: Path | None) -> Iterator[None]:
    """Send stdout to a file, which is written whole at the end of the block."""
    if path is None:
        yield
        return
    before = sys.stdout
    sys.stdout = text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    try:
        yield
    finally:
        sys.stdout = before
    text.flush()
    write_output(path, text.buffer.getvalue())
