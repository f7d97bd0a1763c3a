"""Manifests: rows of JSON lines and CSV files with their line numbers; a damaged row stays a row."""

import csv
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.data.cleaning.compression import opened, zstd
from multimodal.data.remote.trust import is_remote
from multimodal.errors import DataError, UsageError
from multimodal.system.files import MOST_JSON, path_of, shown, strict_json

CSV, JSONL = (".csv", ".tsv"), (".jsonl", ".json", ".ndjson")
COMPRESSED = (".gz", ".zst")
MOST_RATIO = 100  # of the sizes of a text and its compressed file, beyond 64 MB; texts in use have 3 to 30
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class Line(NamedTuple):
    number: int  # from 1
    values: dict[str, Any]
    fault: str = ""


def repeated(spec: str) -> tuple[str, float]:
    """Path and TIMES of `PATH=TIMES`, where a PATH alone stands for once. Raises UsageError for TIMES of 0 or less."""
    path, _, times = spec.rpartition("=")
    if not path or is_remote(spec) or Path(spec).exists():
        return spec, 1.0
    try:
        value = float(times)
    except ValueError:
        return spec, 1.0
    if not 0 < value < math.inf:
        raise UsageError(f"{spec}: expected repeats above 0 (got {times})")
    return path, value


def short_names(paths: Sequence[str], parts: int = 1) -> list[str]:
    """The last `parts` of each path, or more where paths would have one name."""
    split = [Path(path).parts for path in paths]
    while len({one[-parts:] for one in split}) < len(set(split)):
        parts += 1
    return [str(Path(*one[-parts:])) for one in split]


def ending(path: str | Path) -> str:
    """Lower-case ending of a file name, before that of a compression."""
    path = Path(path)
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path.name).suffix.lower()


def is_manifest(path: str | Path) -> bool:
    return ending(path) in CSV + JSONL


def is_json(path: Path) -> bool:
    """Return True for JSON lines, False for text."""
    return ending(path) in JSONL


def read_text(path: Path) -> str:
    """Read a plain, gzip or Zstandard file in UTF-8. Raises DataError for one that cannot be read."""
    try:
        return _data(path).decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8 ({error.object[error.start]:#04x})") from None


def read_aligned(paths: Sequence[Path]) -> list[list[str]]:
    """Read the stripped lines of files whose lines of equal number belong together. Raises DataError for a file that
    cannot be read, or whose number of lines differs."""
    texts: list[list[str]] = []
    for path in paths:
        lines = read_text(path).split("\n")  # splitlines() would also cut at U+2028
        lines = lines[:-1] if not lines[-1] else lines
        if texts and len(lines) != len(texts[0]):
            raise DataError(f"{path}: expected {len(texts[0])} lines as in {paths[0]} (got {len(lines)})")
        texts.append([line.strip() for line in lines])
    return texts


def read_list(path: Path, separator: str | None = None) -> Iterator[Line]:
    """Read rows of a CSV/TSV with a header line, or of a file with one JSON object per line, packed or not. Raises
    DataError naming the line where reading fails, or a column that the header names twice."""
    data = _data(path)
    return _csv(path, data, separator) if ending(path) in CSV else _json(data)


def _data(path: Path) -> bytes:
    """The bytes of a file, unpacked, without UTF-8's byte order mark. Raises DataError also for UTF-16's."""
    path = path_of(path, DataError)
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: not a regular file (folder, device, pipe or socket)")
    try:
        with path.open("rb") as file, opened(path, file) as unpacked:
            most = max(MOST_JSON, MOST_RATIO * path.stat().st_size)
            data = unpacked.read() if unpacked is file else b"".join(_bounded(path, unpacked, most))
    except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: expected UTF-8 (got UTF-16)")
    return data.removeprefix(b"\xef\xbb\xbf")


def _bounded(path: Path, stream: io.BufferedIOBase, most: int) -> Iterator[bytes]:
    while part := stream.read(1 << 20):
        if (most := most - len(part)) < 0:
            raise DataError(f"{path}: unpacks to more than {MOST_RATIO} times its size")
        yield part


def _json(data: bytes) -> Iterator[Line]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            values = strict_json(line, halves=True)  # lone surrogates are a fault of the text, not of the line
        except ValueError as error:
            yield Line(number, {}, f"not JSON ({error})")
            continue
        if isinstance(values, dict):
            yield Line(number, values)
        else:
            yield Line(number, {}, f"not a JSON object ({shown(values)})")


def _csv(path: Path, data: bytes, separator: str | None) -> Iterator[Line]:
    """`separator` None: a tab in a .tsv or if the header has one (open_clip's default), else a comma."""
    text, tsv = data.decode("utf-8", "surrogateescape"), ending(path) == ".tsv"
    mark = separator or ("\t" if tsv or "\t" in text.partition("\n")[0] else ",")
    rows = _tsv_rows(text) if tsv and mark == "\t" else _csv_rows(path, text, mark)
    header = [name.strip() for name in next(rows, (0, []))[1]]
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise DataError(f"{path}: duplicate column {twice[0]} ({', '.join(header):.400})")
    if separator is None and len(header) == 1 and ";" in header[0]:
        raise DataError(f"{path}: expected columns separated by a comma or a tab (got {header[0]:.80})")
    for number, row in rows:
        fault = ""
        if len(row) != len(header):
            fault = f"columns do not fit the header ({len(row)} instead of {len(header)})"
        elif any("\udc80" <= c <= "\udcff" for value in row for c in value):
            fault = f"not UTF-8 text ({row!r:.80})"
        yield Line(number, dict(zip(header, row, strict=False)), fault)


def _tsv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if line:
            yield number, tsv_cells(line)


def tsv_cells(line: str) -> list[str]:
    """Cells between tabs. One in quotes, all quotes within doubled, loses them (pandas' files); others are literal, as
    in GLUE's files, where a text may begin with a quote."""
    return [cell[1:-1].replace('""', '"') if _QUOTED.fullmatch(cell) else cell for cell in line.split("\t")]


def _csv_rows(path: Path, text: str, mark: str) -> Iterator[tuple[int, list[str]]]:
    rows, following = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True), 1
    try:
        for row in rows:
            number, following = following, rows.line_num + 1  # rows may span lines
            if row:
                yield number, row
    except csv.Error as error:
        raise DataError(f"{path}: line {rows.line_num}: not CSV ({error})") from None
