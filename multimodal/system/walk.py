"""Files below folders and of glob patterns, sorted. Links to folders are followed at most once."""

import glob
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

Refused = Callable[[OSError], None]


class Links:
    """Links to folders in a walk from `root`: followed unless they lead back or to a folder that is read anyway, whose
    files would count twice."""

    def __init__(self, root: str):
        self.root = os.path.realpath(root)
        self.seen: set[tuple[int, int]] = set()
        self.left: dict[str, str] = {}  # link: target

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
        """Return True on the first visit of a folder behind a link."""
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
    """Yield files with these suffixes below a folder, without dot files; None: all entries, folders too. A folder that
    cannot be listed goes to `refused`, or is a warning. `links` decides which links to folders are followed."""
    stack = [_Level(folder, links is not None and os.path.islink(folder), _entries(folder, refused))]
    while stack:
        if (entry := next(stack[-1].entries, None)) is None:
            stack.pop()
            continue
        path, linked = entry.name if stack[-1].folder == "." else entry.path, stack[-1].linked
        link = entry.is_symlink()
        is_folder = os.path.isdir(entry.path) if link else entry.is_dir()
        if suffixes is None or (os.path.splitext(entry.name)[1].lower() in suffixes and not is_folder):
            yield path  # dead links and pipes too: reading names them
        if not is_folder or (link and links is None):
            continue
        if links.follows(entry.path) if link else not linked or links.enters(entry.path):
            stack.append(_Level(path, linked or link, _entries(path, refused)))


class _Level(NamedTuple):
    """Folder that is being walked; `linked`: reached through a link."""

    folder: str
    linked: bool
    entries: Iterator[os.DirEntry]


def _entries(folder: str, refused: Refused | None) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return iter(sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name))
    except OSError as error:
        if refused is None:
            warnings.warn(f"{folder}: cannot be listed ({error.strerror}), so its files are left out", stacklevel=3)
        else:
            refused(error)
        return iter(())


def matches(pattern: str) -> list[str]:
    """Paths that match a glob pattern. `**` follows no links to folders: two in one folder would already have too many
    paths through them."""
    parts = pattern.split("/")
    if "**" not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index("**")
    root, rest = "/".join(parts[:at]) or ("/" if at else "."), parts[at:]
    paths = []
    for top in sorted(glob.glob(root)) if glob.has_magic(root) else [root]:
        if os.path.isdir(top):
            skipped = 0 if top == "." else len(top.rstrip("/")) + 1
            paths += [path for path in walk(top) if _fits(path[skipped:].split("/"), rest)]
    return sorted(path for path in paths if not (os.path.islink(path) and os.path.isdir(path)))


def _fits(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_fits(parts[skip:], patterns[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], patterns[0]) and _fits(parts[1:], patterns[1:])
