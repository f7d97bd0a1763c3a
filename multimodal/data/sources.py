"""Sources of training items: folders, tars, CSV and JSON lines, here or behind a URL, all read by number.

Nothing is decoded here: an item is a path or bytes with its label and texts. What cannot be an item at all (a line
without its path, a sample without its picture) keeps its number and raises when it is read, so that no label shifts.
"""

import bisect
import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multimodal.data.manifests import CSV, JSONL, Line, read_list
from multimodal.data.remote.copies import fetch, fetch_row
from multimodal.data.remote.trust import OWN_FOLDER, Trust, is_remote
from multimodal.data.shards import Handles, Shot, plain_tar, shots
from multimodal.errors import DataError
from multimodal.system.walk import Links, walk
from multimodal.tokens.audio.reading import SUFFIXES as SOUNDS
from multimodal.tokens.image.reading import SUFFIXES as PICTURES

MEDIA = PICTURES | SOUNDS
PATHS = ("audio_filepath", "file_name", "filepath", "image", "path", "file")
TEXTS = ("text", "captions", "caption", "title")
LABELS = ("label", "class")
TARS = (".tar", ".tar.gz", ".tgz")
SPLITS = {"train", "val", "valid", "validation", "dev", "test"}


@dataclass(frozen=True)
class Sample:
    """One item, undecoded. `fields`: all columns of its line, or its `.json` member."""

    name: str
    media: Path | bytes
    label: str | None
    texts: tuple[str, ...]
    fields: dict[str, Any]


class Row(NamedTuple):
    """What is known of an item without its media: a path, a URL, or (shard, offset, size)."""

    name: str
    media: Any = None
    label: str | None = None
    texts: Sequence[str] = ()
    fields: dict[str, Any] | None = None
    fault: str = ""
    place: str | int = ""  # where it lies, "LIST line N" for a row of a list (packed: the number)


class Items:
    """Rows packed into one buffer, which forked workers share (a list of objects is copied page by page as its
    reference counts change). `labels`: the distinct ones, sorted, or None.

    `trust`: of rows that name files or URLs, which then are those of the list `where`."""

    def __init__(
        self, where: str, rows: Iterable[Row], shards: Sequence[Path] = (), cache: Path | None = None,
        trust: Trust | None = None,
    ):  # fmt: skip
        rows = _complete(list(rows))
        self.where, self.trust = where, trust
        if not any(not row.fault for row in rows):
            first = f"{self._place(rows[0])}: {rows[0].fault}".removeprefix(f"{where} ") if rows else "0 found"
            raise DataError(f"{where}: no usable item ({first})")
        packed = [json.dumps(row).encode() for row in rows]
        self.labels = tuple(sorted({row.label for row in rows if row.label is not None})) or None
        self.shards, self.cache = [str(path) for path in shards], cache
        # a list may be a link, as in the Hugging Face cache: the folder of the file itself is its own too
        self.folders = [] if is_remote(where) else [os.path.realpath(os.path.dirname(path) or ".")
                                                    for path in (where, os.path.realpath(where))]  # fmt: skip
        self._data, self._ends = b"".join(packed), np.cumsum([0, *map(len, packed)])
        self._handles = Handles()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def row(self, key: int) -> Row:
        """What is known without reading the media: label, texts and fields, such as a duration. Cheap."""
        if not 0 <= key < len(self):
            raise IndexError(f"item {key} of {len(self)}")
        row = Row(*json.loads(self._data[self._ends[key] : self._ends[key + 1]]))
        return row._replace(fields=row.fields or {}, place=self._place(row))

    def _place(self, row: Row) -> str:
        return f"{self.where} line {row.place}" if row.place else row.name

    def name(self, key: int) -> str:
        """Where an item lies: `LIST line N`, `shard.tar!member`, or its path in a folder."""
        return self.row(key).place

    def read(self, key: int) -> Sample:
        """Raises DataError for a broken item, OSError or DataError where its shard or URL cannot be read."""
        row = self.row(key)
        if row.fault:
            raise DataError(f"{row.place}: {row.fault}")
        if isinstance(row.media, str):
            media = self._file(row.media)
        else:
            shard, offset, size = row.media
            media = self._handles.read(self.shards[shard], offset, size)
        return Sample(row.name, media, row.label, tuple(row.texts), row.fields)

    def _file(self, media: str) -> Path:
        if self.trust is None:
            return Path(media)
        if is_remote(media):
            return fetch_row(media, self.cache, self.trust, self.where if is_remote(self.where) else "")
        if self.folders and (cause := self.trust.strays(media, self.folders)):
            raise DataError(f"{media}: {cause}")
        return Path(media)


class Joined:
    """Sources after each other: the keys of the second go on where those of the first end."""

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

    def row(self, key: int) -> Row:
        source, own = self._at(key)
        return source.row(own)

    def name(self, key: int) -> str:
        return self.row(key).place

    def read(self, key: int) -> Sample:
        source, own = self._at(key)
        return source.read(own)


Source = Items | Joined


def joined(sources: Sequence[Source]) -> Source:
    return sources[0] if len(sources) == 1 else Joined(sources)


def open_source(
    data: str | Path | Sequence[str | Path], *, path: str | None = None, text: str | None = None,
    label: str | None = None, separator: str | None = None, cache: Path | None = None, trust: Trust = OWN_FOLDER,
) -> Source:  # fmt: skip
    """Items of a folder with a folder a class, a WebDataset tar, a folder, pattern (`train-{0000..0012}.tar`,
    `train-*.tar`) or `::` list of tars, a CSV/TSV, or JSON lines; or several of these after each other.

    `path`, `text`, `label` name the columns of a list, or the keys of `.json` members; by default the first of
    `PATHS`, `TEXTS`, `LABELS` that a line has. Paths in a list are relative to its folder, and lie in it; `trust` lets
    them leave it, and names the hosts of URLs. What some items have (label, text), all must have: one without is
    broken. URLs are copied to `cache` once (`remote.fetch`).
    Raises DataError for what is no such source, or holds no usable item."""
    names = _Names(*((given,) if given else usual for given, usual in ((path, PATHS), (text, TEXTS), (label, LABELS))))
    if not isinstance(data, str | Path):
        options = {"path": path, "text": text, "label": label, "separator": separator, "cache": cache, "trust": trust}
        return joined([open_source(part, **options) for part in data])
    parts = expanded(str(data))
    if not parts:
        raise DataError(f"{data}: no such file or folder (0 found)")
    if all(_is_tar(part) for part in parts):
        files = [plain_tar(_local(part, cache), cache) for part in parts]
        return Items(str(data), _tar_rows(parts, files, names), files, cache)
    return joined([_open_one(part, names, separator, cache, trust) for part in parts])


class _Names(NamedTuple):
    path: tuple[str, ...]
    text: tuple[str, ...]
    label: tuple[str, ...]


def _open_one(part: str, names: _Names, separator: str | None, cache: Path | None, trust: Trust) -> Items:
    if not is_remote(part) and Path(part).is_dir():
        return Items(part, _folder_rows(Path(part)))
    if not is_remote(part) and not Path(part).exists():
        raise DataError(f"{part}: no such file or folder")
    if _ending(part) not in CSV + JSONL:
        known = " ".join((*TARS, *CSV, *JSONL))
        raise DataError(f"{part}: neither a folder nor a list or tar ({known}; ends in {_ending(part) or 'nothing'!r})")
    base = part.partition("?")[0].rpartition("/")[0] if is_remote(part) else str(Path(part).parent)
    lines = read_list(_local(part, cache), separator)
    return Items(part, (_list_row(line, base, names, trust) for line in lines), cache=cache, trust=trust)


def expanded(data: str) -> list[str]:
    """Local paths and URLs, `::`, braces, globs and folders of tars resolved."""
    if Path(data).is_dir():
        return _folder_tars(Path(data)) or [data]
    if Path(data).exists():
        return [data]
    from webdataset.shardlists import expand_urls

    try:
        parts = expand_urls(data)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise DataError(f"{data}: the pattern cannot be expanded ({error})") from None
    found = []
    for part in parts:
        if is_remote(part) or not glob.has_magic(part) or Path(part).exists():
            found += [part] if part == data else expanded(part)
        else:
            found += sorted(glob.glob(part))
    return found


def _folder_tars(folder: Path) -> list[str]:
    """Raises DataError for tars of several sets, which would be mixed, such as training and test."""
    tars = sorted(p for p in folder.iterdir() if p.name.endswith(TARS))
    sets = sorted({tar.name.split(".")[0].rstrip("0123456789") for tar in tars})
    if len(sets) > 1:
        raise DataError(
            f"{folder}: holds tars of several sets ({', '.join(sets)}): name one, as {folder}/{sets[0]}*.tar"
        )
    return [str(tar) for tar in tars]


def _is_tar(part: str) -> bool:
    return part.startswith("pipe:") or (part.split("?")[0].lower().endswith(TARS) and not Path(part).is_dir())


def _ending(part: str) -> str:
    return Path(part.split("?")[0] if is_remote(part) else part).suffix.lower()


def _local(part: str, cache: Path | None) -> Path:
    if is_remote(part):
        return fetch(part, cache)
    if not Path(part).is_file():
        raise DataError(f"{part}: {'not a regular file' if Path(part).exists() else 'no such file'} (cannot be read)")
    return Path(part)


def _folder_rows(folder: Path) -> Iterator[Row]:
    """Pictures and recordings by class folder; of a folder without folders, all without labels. As in torchvision's
    ImageFolder, other files are left out."""
    links, unlisted = Links(str(folder)), list[OSError]()
    inner = sorted(p for p in folder.iterdir() if os.path.isdir(p) and not p.name.startswith("."))
    inner = [p for p in inner if not p.is_symlink() or links.follows(str(p))]
    if inner and {p.name.lower() for p in inner} <= SPLITS:
        raise DataError(f"{folder}: holds the splits {', '.join(p.name for p in inner)}: name one of them")
    for place in inner or [folder]:
        for path in walk(str(place), MEDIA, unlisted.append, links):
            yield Row(path, path, place.name if inner else None)
    links.warn()
    for error in unlisted:
        yield Row(error.filename, fault=f"a folder that cannot be listed ({error.strerror})")


def _list_row(line: Line, base: str, names: _Names, trust: Trust) -> Row:
    values, fault = line.values, line.fault
    if fault:
        return Row("", fault=fault, place=line.number)
    given = _first(values, names.path)
    if not isinstance(given, str) or not given:
        cause = f"no {' or '.join(names.path)}{'' if given is None else f' ({given!r})'}"
        return Row("", fault=cause, place=line.number)
    media, refused = trust.placed(given, base)
    if refused:
        return Row(given, fault=refused, place=line.number)
    label, texts, fault = _told(values, names)
    return Row(media, media, label, texts, values, fault, line.number)


def _told(values: dict[str, Any], names: _Names) -> tuple[str | None, list[str], str]:
    """Label, texts, fault."""
    label, told = _first(values, names.label), _first(values, names.text)
    texts = told if isinstance(told, list) else [] if told is None else [told]
    wrong = [text for text in texts if not isinstance(text, str)]  # None among them
    fault = f"a text is no string ({wrong[0]!r})" if wrong else ""
    return None if label is None else str(label).strip() or None, texts if not fault else [], fault


def _first(values: dict[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _tar_rows(parts: list[str], files: list[Path], names: _Names) -> Iterator[Row]:
    for number, (part, file) in enumerate(zip(parts, files, strict=True)):
        for shot in shots(file):
            yield _shot_row(shot, number, part, names)


def _shot_row(shot: Shot, number: int, shard: str, names: _Names) -> Row:
    name = f"{shard}!{shot.name}"
    if shot.fault:
        return Row(name, fault=shot.fault)
    found = [m for ending, m in shot.members.items() if f".{ending.rpartition('.')[2]}" in MEDIA]
    if not found:
        return Row(name, fault=f"no picture or recording among its members ({', '.join(shot.members)})")
    try:
        small = {ending: data.decode("utf-8") for ending, data in shot.small.items()}
        fields = json.loads(small.get("json", "{}"))
    except (ValueError, RecursionError) as error:
        return Row(name, fault=f"a member cannot be read ({error})")
    if not isinstance(fields, dict):
        return Row(name, fault="its .json is no JSON object")
    label, texts, fault = _told(fields, names)
    label = small["cls"].strip() or None if "cls" in small else label
    texts = [small["txt"].strip()] if "txt" in small else texts
    place = [number, found[0].offset, found[0].size]
    return Row(f"{shard}!{found[0].name}", place, label, texts, fields, fault)


def _complete(rows: list[Row]) -> list[Row]:
    """What some items have, all must have."""
    labelled, told = any(row.label is not None for row in rows), any(row.texts for row in rows)
    for at, row in enumerate(rows):
        lacks = "label" if labelled and row.label is None else "text" if told and not row.texts else ""
        if lacks and not row.fault:
            rows[at] = row._replace(fault=f"no {lacks} (others of its source have one)")
    return rows
