"""Pages of text files and JSON lines, in chunks that depend on the files alone."""

import codecs
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from multimodal.data.cleaning.compression import opened, zstd
from multimodal.data.manifests import is_json
from multimodal.errors import DataError
from multimodal.system.files import open_media, shown, strict_json

CHUNK = 1 << 20  # bytes of text in the pages of a chunk
LONGEST = 16 << 20  # bytes of a page, which is held in memory as a whole
_SKIP = 1 << 20


class Position(NamedTuple):
    """Place in the inputs: a file's number, bytes of its text, lines before."""

    file: int = 0
    offset: int = 0
    line: int = 0


class RawPage(NamedTuple):
    """`line`: the file's line that the page begins on, from 1. `fault`: cause for which `data` cannot be used."""

    file: int
    line: int
    data: bytes
    fault: str = ""


class Chunk(NamedTuple):
    """`end`: where the next chunk begins. `faults`: files that cannot be read (to their end), with the cause."""

    pages: list[RawPage]
    end: Position
    faults: list[tuple[int, str]]


def chunks(
    files: Sequence[Path], documents: str, start: Position, progress: Callable[[int], None] = lambda read: None
) -> Iterator[Chunk]:
    """Read the pages from `start` on. `progress(bytes)` gets what was read of the files."""
    pages, size, faults, before = [], 0, [], sum(map(_size, files[: start.file]))
    for number in range(start.file, len(files)):
        place = begin = start if number == start.file else Position(number)
        try:
            with open_media(files[number], str(files[number]), DataError) as file:
                for page, place in _pages(files[number], file, documents, begin):
                    pages.append(page)
                    size += len(page.data)
                    if size >= CHUNK:
                        progress(before + file.tell())
                        yield Chunk(pages, place, faults)
                        pages, size, faults = [], 0, []
            if place.line == 0:
                faults.append((number, "holds no text"))
        except DataError as error:
            faults.append((number, str(error).removeprefix(f"{files[number]}: ")))
        except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
            cause = getattr(error, "strerror", None) or error
            faults.append((number, f"cannot be read beyond line {place.line} ({cause})"))
        before += _size(files[number])
    if pages or faults:
        yield Chunk(pages, Position(len(files)), faults)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _pages(path: Path, file: IO[bytes], documents: str, start: Position) -> Iterator[tuple[RawPage, Position]]:
    """Pages with the position after each. A page that the file breaks off in is left out."""
    single = is_json(path) or documents == "lines"
    parts, size, begin, end = [], 0, start.line + 1, start
    for data, end in _lines(path, file, start):
        blank = data is not None and not data.strip()
        if single or (blank and documents == "blank"):
            if single and not blank:
                yield _page(start.file, end.line, [data or b""], LONGEST + (data is None)), end
            elif size:
                yield _page(start.file, begin, parts, size), end
            parts, size, begin = [], 0, end.line + 1
            continue
        size += LONGEST + 1 if data is None else len(data)
        if size > LONGEST:
            parts.clear()
        else:
            parts.append(data)
    if size:
        yield _page(start.file, begin, parts, size), end


def _page(file: int, line: int, parts: list[bytes], size: int) -> RawPage:
    fault = f"is longer than {LONGEST >> 20} MB (see --documents)" if size > LONGEST else ""
    return RawPage(file, line, b"".join(parts), fault)


def _lines(path: Path, file: IO[bytes], start: Position) -> Iterator[tuple[bytes | None, Position]]:
    """Lines with the position after each; None for one that is too long."""
    stream, (number, offset, line) = opened(path, file), start
    stream.seek(offset)
    while data := stream.readline(LONGEST):
        size, rest = len(data), data
        while not rest.endswith(b"\n") and (size >= LONGEST) and (rest := stream.readline(_SKIP)):
            size += len(rest)
        if not offset:
            data = data.removeprefix(codecs.BOM_UTF8)
        offset, line = offset + size, line + 1
        yield data if size <= LONGEST else None, Position(number, offset, line)


class PageText(NamedTuple):
    """`bad`: the cause of each line, by its number from 1, that cannot be used. `record`: of a JSON line."""

    text: str
    bad: dict[int, str]
    record: dict | None = None


def page_text(page: RawPage, json_field: str | None) -> PageText:
    """The text of a page, in the field of a JSON line where one is given. Raises DataError for a JSON line that cannot
    be used."""
    if json_field is None:
        text, bad = _decoded(page.data)
        return PageText(text, bad)
    try:
        record = strict_json(page.data)
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x})") from None
    except ValueError as error:
        raise DataError(f"is not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(text := record.get(json_field), str):
        raise DataError(f"has no text in field {json_field!r} ({shown(record)})")
    return PageText(*_without_nul(text), record)


def _decoded(data: bytes) -> tuple[str, dict[int, str]]:
    try:
        return _without_nul(data.decode())
    except UnicodeDecodeError:
        lines, bad = data.split(b"\n"), {}
    for number, line in enumerate(lines, 1):
        try:
            line.decode()
        except UnicodeDecodeError:
            bad[number], lines[number - 1] = "not_utf8", b""
    text, others = _without_nul(b"\n".join(lines).decode())
    return text, bad | others


def _without_nul(text: str) -> tuple[str, dict[int, str]]:
    if "\0" not in text:
        return text, {}
    lines = text.split("\n")
    bad = {number: "nul" for number, line in enumerate(lines, 1) if "\0" in line}
    return "\n".join("" if number in bad else line for number, line in enumerate(lines, 1)), bad
