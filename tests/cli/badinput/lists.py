"""Untrusted lists: rows that reach outside the list's folder, and broken rows, each by file and line."""

import json
import os
import re
from pathlib import Path

from .rows import Row, prints


def listed(*names: str, labels: str = ""):
    """`labels`: a letter for each row."""

    def make() -> None:
        Path("set").mkdir()
        Path("set/red.png").write_bytes(Path("red.png").read_bytes())
        Path("set/bad.png").write_bytes(b"no image")
        rows = [{"file_name": name} for name in names]
        for row, label in zip(rows, labels, strict=False):
            row["label"] = f"class {label}"
        Path("set/a.jsonl").write_text("\n".join(map(json.dumps, rows)))

    return make


VALIDATE = "validate set/a.jsonl --workers 1"
WRITTEN = ["set/**"]
REFUSED = {
    "an internal address": ("http://127.0.0.1:9/x.jpg", "--remote 127.0.0.1 allows it"),
    "the metadata of a cloud": ("http://169.254.169.254/x.jpg", "--remote 169.254.169.254 allows it"),
    "a store that a program would read": ("gs://bucket/x.jpg", "--remote gs://bucket allows it"),
    "a file by URL": ("file:///etc/passwd", "file: URLs in a list are not read"),
    "a command": ("pipe:touch ../outside/made", "pipe: URLs in a list are not read"),
    "an absolute path": ("/etc/passwd", "('/etc/passwd'; --trust_paths allows it)"),
    "a path upwards": (
        "../red.png",
        "a path outside of the folder of the list ('../red.png'; --trust_paths allows it)",
    ),
    "NUL": ("x\0.png", "NUL in a path"),
}


def null_text() -> None:
    os.mkdir("set")
    Path("set/a.jsonl").write_text('{"path": "../red.png", "text": [null]}\n{"path": "../red.png", "text": "b"}\n')


ROWS = [
    Row("null among the texts", f"{VALIDATE} --trust_paths", null_text, code=1, writes=WRITTEN,
        facts=prints("set/a.jsonl line 1: a text is not a string (None)", "1 of 2 items")),
    *(
        Row(f"a row that names {kind}", VALIDATE, listed("red.png", name), code=1, writes=WRITTEN,
            facts=prints("set/a.jsonl line 2: ", cause, "1 of 2 items are broken"))
        for kind, (name, cause) in REFUSED.items()
    ),
    Row("all rows refused", VALIDATE, listed("../red.png"), [
        "set/a.jsonl: no usable item (line 1: a path outside of the folder of the list ('../red.png'; --trust_paths "
        "allows it))"], writes=WRITTEN),
    Row("a path upwards, trusted", f"{VALIDATE} --trust_paths", listed("red.png", "../red.png"), writes=WRITTEN,
        facts=prints("0 of 2 items are broken")),
    Row("a host that is none", f"{VALIDATE} --remote a/b", listed("red.png"), ["remote 'a/b': not a host, such as "
        "example.org or s3://bucket"], writes=WRITTEN),
    Row("the same broken image in two lines", VALIDATE, listed("bad.png", "red.png", "bad.png"), code=1,
        writes=WRITTEN, facts=prints("set/a.jsonl line 1: set/bad.png: not a readable image",
                                     "set/a.jsonl line 3: set/bad.png: not a readable image", "2 of 3 items")),
    Row("zero-shot evaluation goes on", "evaluate zeroshot set/a.jsonl -m {clip} --templates none",
        listed("red.png", "/etc/passwd", "bad.png", "red.png", labels="abab"), [
            re.compile(r"set/a\.jsonl line 2: an absolute path outside .*--trust_paths allows it"),
            re.compile(r"set/a\.jsonl line 3: set/bad\.png: not a readable image")], writes=WRITTEN,
        facts=prints("acc1")),
    Row("a loop of links", "validate set --workers 1", lambda: (listed("red.png")(), Path("set/loop").symlink_to(".")),
        [re.compile("warning: set/loop: the link leads to .*, which is read already")], code=1, writes=WRITTEN,
        facts=prints("1 of 2 items are broken", "set/bad.png: not a readable image")),
]  # fmt: skip
