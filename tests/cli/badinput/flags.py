"""Flags and label lists that cannot be used."""

import os
import re
from pathlib import Path

from .rows import Row, silent

FLAGS = [("--top", "0"), ("--top", "x"), ("--format", "xml"), ("--batch_size", "-1"), ("--unknown",)]
LABELS = "classify red.png --labels_file labels -m {clip}"
EMPTY = [
    ["classify", "", "--labels", "a,b"], ["classify", "red.png", "--labels", "a,b", "--heatmap", ""],
    ["classify", "red.png", "--labels", "a,b", "--templates", ""], ["classify", "red.png", "--labels_file", ""],
    ["caption", "red.png", "-m", "m", "--regions", ""], ["caption", "", "-m", "m"], ["index", "", "-o", "i"],
    ["search", "dog", "--index", ""], ["evaluate", "zeroshot", "d", "--features_cache", ""],
]  # fmt: skip
MODEL = re.compile("neither a path nor a known model.{0,300}$")


def file(name: str, content: bytes | str):
    return lambda: Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


ROWS = [
    *(
        Row(" ".join(flags), ["classify", "a.png", "--labels", "a,b", *flags], None, [re.compile(flags[0])], silent, 2)
        for flags in FLAGS
    ),
    Row("labels in latin-1", LABELS, file("labels", "café\nb".encode("latin-1")),
        ["--labels_file labels: is not UTF-8 text (byte 3 is 0xe9)"], silent),
    Row("labels in UTF-16", LABELS, file("labels", "a\nb".encode("utf-16")), [re.compile("not UTF-8")], silent),
    Row("no labels file", LABELS, None, [re.compile("labels.*No such file")], silent),
    *(
        Row(f"fault {cause} of {flag}", f"classify red.png {flag} list.txt -m {{clip}} {more}",
            file("list.txt", content), [re.compile(rf"^multimodal: error: {flag} list\.txt: .*{cause}")], silent)
        for flag, content, cause, more in (
            ("--labels_file", "a\nb\na\n", "'a' is repeated", ""), ("--labels_file", " \n\n", "at least one", ""),
            ("--templates", "a photo", "expected {} exactly once", "--labels a,b"),
            ("--templates", "\n", "expected at least one", "--labels a,b"),
        )
    ),
    *(
        Row(f"{kind} as {flag}", f"classify red.png {more} {flag} odd -m {{clip}}", make,
            [re.compile(rf"{flag} '?odd.*not a regular file")], silent)
        for flag, more in (("--labels_file", ""), ("--templates", "--labels a,b"))
        for kind, make in (("pipe", lambda: os.mkfifo("odd")), ("folder", lambda: os.mkdir("odd")))
    ),
    *(
        Row(f"empty name {number}", words, None, [re.compile(r"an empty name \(''\)")], silent, 2)
        for number, words in enumerate(EMPTY)
    ),
    *(
        Row(f"label {cause} {labels}", ["classify", "red.png", "-m", "{clip}", "--labels", *labels], None,
            [re.compile(cause)], silent)
        for labels, cause in ((["red", " "], "empty"), (["red", "blue", "red"], "is repeated"), ([","], "empty"),
                              (["red", " red"], "is repeated"))
    ),
    Row("one label alone", "classify red.png --labels a -m {clip}", None,
        ["multimodal: warning: --labels: one label alone gets the score 1 in every image"], code=0),
    *(
        Row(f"model name {name[:12]!r}", ["info", name], None, [MODEL], silent)
        for name in ("", "a" * 5000, "nul\0byte", "absent-model")
    ),
]  # fmt: skip
