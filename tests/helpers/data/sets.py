"""Small training sets on disk: one colour an image, so that a test sees which image it got."""

import csv
import io
import json
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def png(value: int) -> bytes:
    """An image whose red is `value`."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 0)).save(file, "PNG")
    return file.getvalue()


def wav(seconds: float, promised: float | None = None, rate: int = 8000) -> bytes:
    """A square wave; the header promises `promised` seconds."""
    samples = b"\0\x10\0\xf0" * (round(seconds * rate) // 2)
    size = round((promised or seconds) * rate) * 2
    head = b"RIFF" + struct.pack("<I", 36 + size) + b"WAVEfmt "
    return head + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16) + b"data" + struct.pack("<I", size) + samples


def label(value: int) -> str:
    return f"class{value % 3}"


def tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def shard(path: Path, values: Sequence[int], broken: Sequence[int] = ()) -> Path:
    members = [(value, f"{value:03}.png", png(value)[: 40 if value in broken else None]) for value in values]
    return tar(path, [m for v, name, data in members for m in ((name, data), (f"{v:03}.cls", label(v).encode()))])


def folder(path: Path, values: Sequence[int], broken: Sequence[int] = ()) -> Path:
    for value in values:
        file = path / label(value) / f"{value:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(value)[: 40 if value in broken else None])
    return path


def table(path: Path, values: Sequence[int], broken: Sequence[int] = ()) -> Path:
    """A CSV of `filepath,title` beside its images; the title is the label."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["filepath", "title"])
        for value in values:
            path.with_name(f"{value:03}.png").write_bytes(png(value)[: 40 if value in broken else None])
            writer.writerow([f"{value:03}.png", label(value)])
    return path


def lines(path: Path, rows: Sequence[dict | str | bytes]) -> Path:
    texts = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in texts))
    return path


COLOURS = {"blue": (30, 40, 220), "green": (30, 200, 40), "red": (220, 30, 30), "yellow": (230, 220, 30)}


def squares(path: Path, count: int = 8) -> Path:
    """A folder for each colour, with `count` noisy squares of it."""
    random = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (path / f"{name}_square").mkdir(parents=True)
        for index in range(count):
            pixels = np.array(colour) + random.integers(-25, 25, (20, 24, 3))
            Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path / f"{name}_square" / f"{index}.png")
    return path
