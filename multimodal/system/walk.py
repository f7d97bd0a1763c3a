"""Files in folders and of patterns, in the order of sorted paths. A link to a folder is followed at most once."""

import glob
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

Refused = Callable[[OSError], None]


class Links:
    """Links to folders that a walk from `root` follows: not those that lead back, or to a folder that is read anyway,
    whose files would count again with each turn."""

    def __init__(self, root: str):
        self.root = os.path.realpath(root)
        self.seen: set[tuple[int, int]] = set()
        self.left: dict[str, str] = {}  # link, where it leads

    def follows(self, path: str) -> bool:
        real = os.path.realpath(path)
        inside = os.path.relpath(real, self.root)  # begins with .. outside of the root
        read_anyway = inside == "." or not any(part.startswith(".") for part in inside.split("/"))
        holds_root = self.root.startswith(real.rstrip("/") + "/")
        return self._new(path, real, not read_anyway and not holds_root)

    def _new(self, path: str, real: str, may: bool = True) -> bool:
        status = os.stat(real)
        if may and (status.st_dev, status.st_ino) not in self.seen:
            self.seen.add((status.st_dev, status.st_ino))
            return True
        self.left[path] = real
        return False

    def enters(self, path: str) -> bool:
        """Whether a folder behind a link is met for the first time."""
        return self._new(path, os.path.realpath(path))

    def warn(self) -> None:
        if self.left:
            (link, real), more = next(iter(self.left.items())), len(self.left) - 1
            others = f", nor are {more} more such links" if more else ""
            warnings.warn(
                f"{link}: the link leads to {real}, which is read already or holds the link, and is not followed"
                f"{others}: each file counts once", stacklevel=3,
            )  # fmt: skip


def walk(
    folder: str, suffixes: Collection[str] | None = None, refused: Refused | None = None, links: Links | None = None
) -> Iterator[str]:
    """Files with these suffixes in a folder and those inside it, no dot files; None: all entries, folders too. A folder
    that cannot be listed goes to `refused`, or is a warning. Links to folders are followed where `links` lets them."""
    ways = [_Way(folder, links is not None and os.path.islink(folder), _entries(folder, refused))]
    while ways:
        if (entry := next(ways[-1].entries, None)) is None:
            ways.pop()
            continue
        path, linked = entry.name if ways[-1].folder == "." else entry.path, ways[-1].linked
        link = entry.is_symlink()
        is_folder = os.path.isdir(entry.path) if link else entry.is_dir()
        if suffixes is None or (os.path.splitext(entry.name)[1].lower() in suffixes and not is_folder):
            yield path  # a dead link or a pipe too, so that it is named when it is read
        if not is_folder or (link and links is None):
            continue
        if links.follows(entry.path) if link else not linked or links.enters(entry.path):
            ways.append(_Way(path, linked or link, _entries(path, refused)))


class _Way(NamedTuple):
    """A folder on the way down, and whether it lies behind a link."""

    folder: str
    linked: bool
    entries: Iterator[os.DirEntry]


def _entries(folder: str, refused: Refused | None) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as found:
            return iter(sorted((e for e in found if not e.name.startswith(".")), key=lambda entry: entry.name))
    except OSError as error:
        if refused is None:
            warnings.warn(f"{folder}: cannot be listed ({error.strerror}), so its files are left out", stacklevel=3)
        else:
            refused(error)
        return iter(())


def matches(pattern: str) -> list[str]:
    """What a pattern stands for. `**` does not follow links to folders, of which two in one folder would have more
    ways through them than can be walked."""
    parts = pattern.split("/")
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    root, wanted = "/".join(parts[:at]) or ("/" if at else "."), parts[at:]
    found = []
    for top in sorted(glob.glob(root)) if glob.has_magic(root) else [root]:
        if os.path.isdir(top):
            skipped = 0 if top == "." else len(top.rstrip("/")) + 1
            found += [path for path in walk(top) if _fits(path[skipped:].split("/"), wanted)]
    return sorted(path for path in found if not (os.path.islink(path) and os.path.isdir(path)))


def _fits(parts: list[str], wanted: list[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_fits(parts[skip:], wanted[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _fits(parts[1:], wanted[1:])
