"""Mutators of raw bytes, JSON, lines, archives and their members."""

import copy
import io
import json
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES = [
    None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 2**31 - 1, 2**31, 2**32,
    2**53 + 1, 2**63, 2**64, 10**30, "", " ", "x", "../x", "/etc/passwd", "a" * 5000, "\0", "\u202e", "\ud800",
    "(a+)+$", "(?P<x", "[", "nan", "1e999", "-1", "http://127.0.0.1:9/x", [], {}, [None], [0], [1, 2],
    [[]], ["a", 3], {"": None},     [1] * 3000, {"a": {"b": {"c": []}}},
]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40,
           (1 << 63) - 1, 1 << 63, (1 << 64) - 1]  # fmt: skip
HEAD = 256  # bytes, where formats keep their sizes
TEXTS = (".csv", ".tsv", ".txt", ".arpa", ".tiktoken", ".bpe")
LINES = (".jsonl",)
Random = random.Random


def raw(r: Random, data: bytes, other: bytes = b"") -> bytes:
    """Change bytes one to four times; `other` is a file to splice with."""
    changed = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 4))):
        changed = r.choice(RAW)(r, changed, other)
    return bytes(changed)


def _place(r: Random, data: bytearray) -> int:
    """Random position, in the header half of the time."""
    return r.randrange(max(1, min(len(data), HEAD) if r.random() < 0.5 else len(data)))


def _truncate(r: Random, data: bytearray, _: bytes) -> bytearray:
    return data[: _place(r, data)]


def _flip(r: Random, data: bytearray, _: bytes) -> bytearray:
    for _ in range(r.choice((1, 3, 30)) if data else 0):
        data[_place(r, data)] ^= 1 << r.randrange(8)
    return data


def _splice(r: Random, data: bytearray, other: bytes) -> bytearray:
    other = other or bytes(data)
    return data[: _place(r, data)] + bytearray(other[r.randrange(len(other) or 1) :])


def _block(r: Random, data: bytearray, _: bytes) -> bytearray:
    """Repeat, zero, drop or randomize a block."""
    at, size = _place(r, data), r.choice((1, 4, 16, 100, 1000, 5000))
    block = data[at : at + size]
    new = r.choice(
        (block * r.choice((2, 2, 20)), bytearray(len(block)), bytearray(), bytearray(r.randbytes(len(block))))
    )
    return data[:at] + new + data[at + size :]


def _lie(r: Random, data: bytearray, _: bytes) -> bytearray:
    """Set an integer of 1 to 8 bytes, of either endianness, to an extreme value or one near its own."""
    size, order = r.choice((1, 2, 4, 4, 8)), r.choice(("little", "big"))
    at = _place(r, data)
    old = int.from_bytes(data[at : at + size], order)
    value = r.choice([*NUMBERS, old + 1, old - 1, old * 2, old << 8]) % (1 << 8 * size)
    return data[:at] + value.to_bytes(size, order) + data[at + size :]


RAW: list[Callable[[Random, bytearray, bytes], bytearray]] = [_truncate, _flip, _flip, _splice, _block, _block, _lie,
                                                               _lie, _lie]  # fmt: skip


def _spots(value: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, one in list(inner)[:60]:
        found += _spots(one, (*path, key))
    return found


def odd(r: Random) -> Any:
    """One of `VALUES`, as a copy, since it may be changed further."""
    return copy.deepcopy(r.choice(VALUES))


def edited(r: Random, value: Any) -> Any:
    """One to three changes: another value, a key dropped, doubled or renamed, a number scaled, deep nesting."""
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        spots = _spots(value)
        if not spots or r.random() < 0.03:
            return odd(r)
        *front, last = r.choice(spots)
        holder = value
        for key in front:
            holder = holder[key]
        _edit(r, holder, last)
    return value


def _edit(r: Random, holder: Any, key: Any) -> None:
    old, how = holder[key], r.random()
    if how < 0.12:
        del holder[key]
    elif how < 0.2 and isinstance(holder, dict):
        holder[r.choice(("extra", "", f"{key}2", "__class__"))] = holder[key]
    elif how < 0.25:
        deep: Any = old
        for _ in range(r.choice((3, 50, 900))):
            deep = [deep] if r.random() < 0.5 else {"a": deep}
        holder[key] = deep
    elif how < 0.5 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = r.choice((old + 1, old - 1, -old, old * 1000, old * 10**9, old / 2, str(old)))
    elif how < 0.4 and isinstance(old, str):
        holder[key] = r.choice((old * 100, old[:-1], old.upper(), old + "\0", old + "\n", [old]))
    else:
        holder[key] = odd(r)


def as_json(r: Random, data: bytes) -> bytes:
    """Mutate the parsed value; rarely write valid JSON that few expect."""
    try:
        value = edited(r, json.loads(data))
        text = json.dumps(value)
    except (ValueError, RecursionError):
        return raw(r, data)
    if r.random() < 0.05:
        text = r.choice(("[" * 100_000, text + text, "\ufeff" + text, text.replace('"', "'"), '{"a": 1, ' * 500 + text,
                         text[:-1] + ', "format": 1, "format": 2}', text.replace("1", "1" * 5000, 1)))  # fmt: skip
    return text.encode("utf-8", "surrogatepass")


def as_lines(r: Random, data: bytes, json_lines: bool = False) -> bytes:
    lines = data.split(b"\n")
    for _ in range(r.choice((1, 1, 2, 3))):
        at, how = r.randrange(len(lines)), r.randrange(9)
        line = lines[at]
        if json_lines and how < 5 and line.strip():
            lines[at] = as_json(r, line)
        elif how == 0:
            lines[at : at + 1] = [line] * r.choice((2, 2, 500))
        elif how == 1:
            del lines[at]
            lines = lines or [b""]
        elif how == 2:
            lines[at] = raw(r, line)
        elif how == 3:
            lines[at] = line + r.choice(
                (b"\0", b"\r", b'"', b"\xff\xfe", b"\t\t", b",,", b"x" * 200_000, b"\xe2\x80\xa8")
            )
        elif how == 4:
            lines.insert(at, lines[r.randrange(len(lines))])
        else:
            lines[at] = _cell(r, line)
    return b"\n".join(lines)


def _cell(r: Random, line: bytes) -> bytes:
    """Change one field of a line."""
    separator = next((s for s in (b"\t", b",", b" ") if s in line), b",")
    cells = line.split(separator)
    cells[r.randrange(len(cells))] = str(odd(r)).encode("utf-8", "replace")
    return separator.join(cells)


def as_safetensors(r: Random, data: bytes) -> bytes:
    """Edit the header and write it back with its true length."""
    size = struct.unpack("<Q", data[:8])[0]
    header = as_json(r, data[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def as_zip(r: Random, data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        for name, content in _members(r, members):
            try:
                archive.writestr(name, content)
            except (ValueError, IndexError):  # a name that zipfile does not write
                archive.writestr("x", content)
    return made.getvalue()


def as_tar(r: Random, data: bytes) -> bytes:
    mode = "gz" if data[:2] == b"\x1f\x8b" else ""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(m.name, archive.extractfile(m).read()) for m in archive if m.isfile()]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=f"w:{mode}", format=r.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as tar:
        for name, content in _members(r, members):
            entry = tarfile.TarInfo(name.replace("\0", "?"))
            entry.size = len(content)
            if r.random() < 0.05:
                entry.type, entry.linkname, entry.size = r.choice((b"1", b"2", b"3", b"5", b"6")), "../../x", 0
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def _members(r: Random, members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Change, rename, double or drop one member."""
    at = r.randrange(len(members))
    name, content = members[at]
    how = r.random()
    if how < 0.7:
        members[at] = (name, contents(r, name, content, members[r.randrange(len(members))][1]))
    elif how < 0.8:
        members[at] = (
            r.choice((f"../{name}", f"/{name}", name + "\0x", "x" * 300, "", name.upper(), f"a/{name}")),
            content,
        )
    elif how < 0.9:
        members.insert(r.randrange(len(members)), (name, content))
    else:
        del members[at]
    return members


def contents(r: Random, name: str, data: bytes, other: bytes = b"") -> bytes:
    """Mutate `data` by the format of its name, or as raw bytes."""
    ending = Path(name).suffix.lower()
    aware: Callable[[Random, bytes], bytes] | None = None
    if ending == ".json":
        aware = as_json
    elif ending in LINES:
        aware = lambda r, data: as_lines(r, data, True)
    elif ending in TEXTS:
        aware = as_lines
    elif ending == ".safetensors":
        aware = as_safetensors
    elif ending in (".pt", ".pth", ".bin") and zipfile.is_zipfile(io.BytesIO(data)):
        aware = as_zip
    elif name.endswith((".tar", ".tar.gz")):
        aware = as_tar
    if aware and r.random() < 0.75:
        return aware(r, data)
    return raw(r, data, other)


def mutate(r: Random, path: Path, other: bytes = b"") -> Path:
    path.write_bytes(contents(r, path.name, path.read_bytes(), other))
    return path
