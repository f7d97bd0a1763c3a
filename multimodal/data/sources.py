"""Sources of training items: folders, tars, CSV and JSON lines, local or behind a URL, all read by number.

Nothing is decoded: an item is a path or bytes with its label and texts. A broken item, such as a line without a path,
keeps its number and raises when it is read.
"""

import bisect
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multimodal.data.manifests import CSV, JSONL, Line, ending, read_list
from multimodal.data.remote.copies import fetch, fetch_row
from multimodal.data.remote.trust import OWN_FOLDER, Trust, is_remote
from multimodal.data.shard_index import shard_index
from multimodal.data.shards import LARGEST, TARS, OpenFiles, ShardSample, expanded, is_tar, medium, plain_tar, shots
from multimodal.errors import DataError
from multimodal.system.walk import Links, walk
from multimodal.tokens.audio.reading import SUFFIXES as SOUNDS
from multimodal.tokens.image.reading import SUFFIXES as IMAGES

MEDIA = IMAGES | SOUNDS
PATHS = ("audio_filepath", "file_name", "filepath", "image", "path", "file")
TEXTS = ("text", "transcription", "transcript", "sentence", "captions", "caption", "title", "raw_text")
LABELS = ("label", "class")
KINDS = (str, list | None, str | None, list | tuple, dict | None, str, str | int)  # of a SourceRow in an index
ROWS = 3  # version of `_packed_shard`: an index by another is made again
SPLITS = {"train", "val", "valid", "validation", "dev", "test"}


@dataclass(frozen=True)
class ListColumns:
    """Columns of a list, or keys of `.json` members; by default the first of the usual names that a line has."""

    path_column: str | None = None  # usual: audio_filepath, file_name, filepath, image, path, file
    text_column: str | None = None  # usual: text, transcription, transcript, sentence, caption(s), title, raw_text
    label_column: str | None = None  # usual: label, class

    def path(self, values: dict[str, Any]) -> Any:
        return _first(values, (self.path_column,) if self.path_column else PATHS)

    def label_and_texts(self, values: dict[str, Any]) -> tuple[str | None, list[str], str]:
        """Return label, texts and the fault of a line."""
        label = _first(values, (self.label_column,) if self.label_column else LABELS)
        text = _first(values, (self.text_column,) if self.text_column else TEXTS)
        texts = text if isinstance(text, list) else [] if text is None else [text]
        wrong = [text for text in texts if not isinstance(text, str)]  # None among them
        fault = f"a text is not a string ({wrong[0]!r})" if wrong else ""
        if isinstance(label, float) and label.is_integer():  # 1.0 is the class of 1
            label = int(label)
        if isinstance(label, bool) or not isinstance(label, str | int | None):
            return None, [], f"a label is not a string or a whole number ({label!r:.40})"
        return None if label is None else str(label).strip() or None, texts if not fault else [], fault


USUAL = ListColumns()


def _first(values: dict[str, Any], names: Sequence[str]) -> Any:
    """The first value that is not empty, as a cell of a CSV may be; else the first."""
    found = [values[name] for name in names if values.get(name) is not None]
    return next((value for value in found if value != ""), found[0] if found else None)


@dataclass(frozen=True)
class Sample:
    """One undecoded item. `fields`: all columns of its line, or its `.json` member."""

    name: str
    media: Path | bytes
    label: str | None
    texts: tuple[str, ...]
    fields: dict[str, Any]


class SourceRow(NamedTuple):
    """An item without its media, which is a path, a URL, or (shard, offset, size)."""

    name: str
    media: Any = None
    label: str | None = None
    texts: Sequence[str] = ()
    fields: dict[str, Any] | None = None
    fault: str = ""
    place: str | int = ""  # "LIST line N" for a row of a list (packed: the line number)


def duration_of(fields: dict[str, Any]) -> float:
    """Return the seconds in the field `duration`, a number or a text; NaN without one."""
    try:
        return float(fields["duration"])
    except (KeyError, TypeError, ValueError):
        return math.nan


class PackedRows:
    """Rows packed into one buffer that forked workers share; a list of objects would be copied page by page as its
    reference counts change. `labels`: the distinct ones, sorted, or None. `trust`: for rows of a list."""

    def __init__(self, where: str, rows: Iterable[SourceRow], *, cache: Path | None = None, trust: Trust | None = None):
        rows = _complete(list(rows))
        self.where, self.trust = where, trust
        if not any(not row.fault for row in rows):
            first = f"{self._place(rows[0])}: {rows[0].fault}".removeprefix(f"{where} ") if rows else "0 found"
            raise DataError(f"{where}: no usable item ({first})")
        packed = [json.dumps(row).encode() for row in rows]
        self.labels = tuple(sorted({row.label for row in rows if row.label is not None})) or None
        self.cache = cache
        # a list may be a link, as in the Hugging Face cache: its target's folder counts as its own too
        self.folders = [] if is_remote(where) else [os.path.realpath(os.path.dirname(path) or ".")
                                                    for path in (where, os.path.realpath(where))]  # fmt: skip
        self._data, self._ends = b"".join(packed), np.cumsum([0, *map(len, packed)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, key: int) -> SourceRow:
        """Return label, texts and fields of an item without reading its media."""
        if not 0 <= key < len(self):
            raise IndexError(f"item {key} of {len(self)}")
        row = SourceRow(*json.loads(self._data[self._ends[key] : self._ends[key + 1]]))
        return row._replace(fields=row.fields or {}, place=self._place(row))

    def _place(self, row: SourceRow) -> str:
        return f"{self.where} line {row.place}" if row.place else row.name

    def name(self, key: int) -> str:
        """Return an item's location: `LIST line N`, `shard.tar!member`, or its path in a folder."""
        return self.row(key).place

    def identity(self, key: int) -> str:
        """Return what a cache of an item's content goes by: its file, however its path is written, with size and
        time, or its fault."""
        row = self.row(key)
        return row.fault or _file_identity(row.media)

    def read(self, key: int) -> Sample:
        """Raises DataError for a broken item, OSError or DataError if its shard or URL cannot be read."""
        row = self.row(key)
        if row.fault:
            raise DataError(f"{row.place}: {row.fault}")
        return Sample(row.name, self._media(row.media), row.label, tuple(row.texts), row.fields)

    def _media(self, media: Any) -> Path | bytes:
        if self.trust is None:
            return Path(media)
        if is_remote(media):
            return fetch_row(media, self.cache, self.trust, self.where if is_remote(self.where) else "")
        if self.folders and (cause := self.trust.strays(media, self.folders)):
            raise DataError(f"{media}: {cause}")
        return Path(media)


class TarRows(PackedRows):
    """Samples of tars by their indexes, which are mapped (see `shard_index`)."""

    def __init__(
        self, where: str, parts: Sequence[str], files: Sequence[Path], columns: ListColumns, cache: Path | None
    ):
        self.parts, self.shards, self._handles = list(parts), [str(file) for file in files], OpenFiles()
        kind = [columns.text_column, columns.label_column]
        index = lambda file, part: shard_index(file, [*kind, ROWS], partial(_packed_shard, file, part, columns), cache)
        self._indexes = list(map(index, files, parts))
        self._starts = [0, *accumulate(map(len, self._indexes))]
        facts = [index.facts for index in self._indexes]
        self._lacks = [any(one[name] for one in facts) for name in ("labelled", "texted")]
        self.labels = tuple(sorted(set(chain(*(one["labels"] for one in facts))))) or None
        if not any(all(has or not needed for has, needed in zip(kind, self._lacks, strict=True))
                   for one in facts for kind in one["usable"]):  # fmt: skip
            row = self.row(0) if len(self) else None
            raise DataError(f"{where}: no usable item ({f'{row.place}: {row.fault}' if row else '0 found'})")

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, key: int) -> SourceRow:
        if not 0 <= key < len(self):
            raise IndexError(f"item {key} of {len(self)}")
        shard = bisect.bisect_right(self._starts, key) - 1
        try:
            row = SourceRow(*self._indexes[shard][key - self._starts[shard]])
            offset, size = map(int, row.media or (0, 0))  # nothing else: an index names no file
            typed = all(map(isinstance, (*row, *row.texts), chain(KINDS, repeat(str))))
            fits = typed and 0 <= offset < 1 << 62 and 0 <= size <= LARGEST
        except (TypeError, ValueError, OverflowError, RecursionError):
            fits = False
        if not fits:
            at = key - self._starts[shard]
            raise DataError(f"{self._indexes[shard].path}: row {at} is damaged; delete the index")
        name = f"{self.parts[shard]}!{row.name}"
        fault = row.fault or _lacking(row, *self._lacks)
        return row._replace(name=name, place=name, media=(shard, offset, size), fields=row.fields or {}, fault=fault)

    def identity(self, key: int) -> str:
        row = self.row(key)
        shard, *place = row.media
        return row.fault or f"{_file_identity(self.shards[shard])} {place}"

    def _media(self, media: tuple[int, int, int]) -> bytes:
        shard, offset, size = media
        return self._handles.read(self.shards[shard], offset, size)


class JoinedSources:
    """Concatenation of sources: the keys of the second follow those of the first."""

    def __init__(self, sources: Sequence["Source"]):
        self.sources, self._starts = list(sources), [0, *accumulate(map(len, sources))]
        self.labels = tuple(sorted(set(chain(*(s.labels or () for s in sources))))) or None

    def __len__(self) -> int:
        return self._starts[-1]

    def _at(self, key: int) -> tuple["Source", int]:
        if not 0 <= key < len(self):
            raise IndexError(f"item {key} of {len(self)}")
        part = bisect.bisect_right(self._starts, key) - 1
        return self.sources[part], key - self._starts[part]

    def row(self, key: int) -> SourceRow:
        source, own = self._at(key)
        return source.row(own)

    def name(self, key: int) -> str:
        return self.row(key).place

    def identity(self, key: int) -> str:
        source, own = self._at(key)
        return source.identity(own)

    def read(self, key: int) -> Sample:
        source, own = self._at(key)
        return source.read(own)


Source = PackedRows | JoinedSources


def _file_identity(path: str) -> str:
    """Return a file's real path with size and time; a URL as it is."""
    path = path if is_remote(path) else os.path.realpath(path)
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # such as a URL
        return path
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def joined(sources: Sequence[Source]) -> Source:
    return sources[0] if len(sources) == 1 else JoinedSources(sources)


def open_source(
    data: str | Path | Sequence[str | Path], *, columns: ListColumns = USUAL, separator: str | None = None,
    cache: Path | None = None, trust: Trust = OWN_FOLDER,
) -> Source:  # fmt: skip
    """Open a folder with one folder per class, a WebDataset tar, a folder, pattern (`train-{0000..0012}.tar`,
    `train-*.tar`) or `::` list of tars, a CSV/TSV, or JSON lines (gzip or not); or several of these, concatenated.

    Paths in a list are relative to its folder and must lie in it; `trust` allows others, and names the hosts of URLs.
    If some items have a label or a text, those without are broken. URLs are copied to `cache` once (`remote.fetch`).
    Raises DataError for anything else, or a source without a usable item."""
    if not isinstance(data, str | Path):
        options = {"columns": columns, "separator": separator, "cache": cache, "trust": trust}
        return joined([open_source(part, **options) for part in data])
    parts = expanded(str(data))
    if not parts:
        raise DataError(f"{data}: no such file or folder (0 found)")
    if all(is_tar(part) for part in parts):
        return TarRows(str(data), parts, [plain_tar(_local(part, cache), cache) for part in parts], columns, cache)
    return joined([_open_one(part, columns, separator, cache, trust) for part in parts])


def _open_one(part: str, columns: ListColumns, separator: str | None, cache: Path | None, trust: Trust) -> PackedRows:
    if not is_remote(part) and Path(part).is_dir():
        return PackedRows(part, _folder_rows(Path(part)))
    if not is_remote(part) and not Path(part).exists():
        raise DataError(f"{part}: no such file or folder")
    if _ending(part) not in CSV + JSONL:
        known = " ".join((*TARS, *CSV, *JSONL))
        raise DataError(f"{part}: must be a folder, a list or a tar ({known}; got {_ending(part) or 'no ending'!r})")
    base = part.partition("?")[0].rpartition("/")[0] if is_remote(part) else str(Path(part).parent)
    lines = read_list(_local(part, cache), separator)
    return PackedRows(part, (_list_row(line, base, columns, trust) for line in lines), cache=cache, trust=trust)


def _ending(part: str) -> str:
    return ending(part.split("?")[0] if is_remote(part) else part)


def _local(part: str, cache: Path | None) -> Path:
    if is_remote(part):
        return fetch(part, cache)
    if not Path(part).is_file():
        raise DataError(f"{part}: {'not a regular file' if Path(part).exists() else 'no such file'} (cannot be read)")
    return Path(part)


def _folder_rows(folder: Path) -> Iterator[SourceRow]:
    """Yield images and audio files by class folder, or unlabelled ones of a folder without folders. Other files are
    skipped, as in torchvision's ImageFolder; warns of images and audio files beside class folders and of empty ones."""
    links, unlisted, counts = Links(str(folder)), list[OSError](), Counter[str]()
    inner = sorted(p for p in folder.iterdir() if os.path.isdir(p) and not p.name.startswith((".", "__MACOSX")))
    inner = [p for p in inner if not p.is_symlink() or links.follows(str(p))]
    if inner and {p.name.lower() for p in inner} <= SPLITS:
        raise DataError(f"{folder}: holds the splits {', '.join(p.name for p in inner)}: name one of them")
    for place in inner or [folder]:
        for path in walk(str(place), MEDIA, unlisted.append, links):
            counts[place.name] += 1
            yield SourceRow(path, path, place.name if inner else None)
    links.warn()
    if inner:
        empty = [p.name for p in inner if not counts[p.name] and not unlisted]
        loose = [p.name for p in folder.iterdir() if p.suffix.lower() in MEDIA and p.name[0] != "." and p.is_file()]
        _warn_of_left(folder, "class folders without images or audio files", empty)
        _warn_of_left(folder, "images or audio files beside class folders, left out", sorted(loose))
    for error in unlisted:
        yield SourceRow(error.filename, fault=f"a folder that cannot be listed ({error.strerror})")


def _warn_of_left(folder: Path, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(f"{folder}: {what}: {', '.join(names[:3])}{more}", stacklevel=3)


def _list_row(line: Line, base: str, columns: ListColumns, trust: Trust) -> SourceRow:
    values, fault = line.values, line.fault
    if fault:
        return SourceRow("", fault=fault, place=line.number)
    path = columns.path(values)
    if not isinstance(path, str) or not path:
        names = columns.path_column or " or ".join(PATHS)
        got = f"columns: {', '.join(values):.80}" if path is None else repr(path)
        return SourceRow("", fault=f"no {names} ({got})", place=line.number)
    media, refused = trust.placed(path, base)
    if refused:
        return SourceRow(path, fault=refused, place=line.number)
    label, texts, fault = columns.label_and_texts(values)
    if Path(path).suffix.lower() in SOUNDS and str(values.get("offset") or 0).strip("0."):
        fault = f"excerpts are not read: offset must be 0 (got {values['offset']!r:.40})"
    return SourceRow(media, media, label, texts, values, fault, line.number)


def _packed_shard(file: Path, part: str, columns: ListColumns) -> tuple[dict[str, Any], list[bytes]]:
    """Return facts of the rows of a shard `part` and the rows, packed. `usable`: whether rows without a fault have a
    label and a text, each kind once."""
    labels, usable, texted, rows = set[str](), set[tuple[bool, bool]](), False, []
    for row in (_shot_row(shot, columns) for shot in shots(file, part)):
        labels |= {row.label} if row.label is not None else set()
        texted |= bool(row.texts)
        if not row.fault:
            usable.add((row.label is not None, bool(row.texts)))
        rows.append(json.dumps(row).encode())
    return {"labelled": bool(labels), "texted": texted, "labels": sorted(labels), "usable": sorted(usable)}, rows


def _shot_row(shot: ShardSample, columns: ListColumns) -> SourceRow:
    """Return a row whose media are its offset and size in the shard."""
    name = shot.name
    if shot.fault:
        return SourceRow(name, fault=shot.fault)
    member, fault = medium(shot.members)
    if member is None:
        return SourceRow(name, fault=fault)
    try:
        small = {ending: data.decode("utf-8-sig") for ending, data in shot.small.items()}
        fields = json.loads(small.get("json", "{}"))
    except (ValueError, RecursionError) as error:
        return SourceRow(name, fault=f"a member cannot be read ({error})")
    if not isinstance(fields, dict):
        return SourceRow(name, fault="its .json is not a JSON object")
    label, texts, fault = columns.label_and_texts(fields)
    label = small["cls"].strip() or None if "cls" in small else label
    texts = [small["txt"].strip()] if "txt" in small else texts
    return SourceRow(member.name, [member.offset, member.size], label, texts, fields, fault)


def _complete(rows: list[SourceRow]) -> list[SourceRow]:
    """Mark rows without a label or text as broken if others have one."""
    labelled, texts = any(row.label is not None for row in rows), any(row.texts for row in rows)
    for at, row in enumerate(rows):
        if not row.fault and (fault := _lacking(row, labelled, texts)):
            rows[at] = row._replace(fault=fault)
    return rows


def _lacking(row: SourceRow, labelled: bool, texts: bool) -> str:
    lacks = "label" if labelled and row.label is None else "text" if texts and not row.texts else ""
    return f"no {lacks} (others of its source have one)" if lacks else ""
