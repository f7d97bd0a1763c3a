"""Output files: never over an input, nor over a file that another hand wrote or changed.

Each output carries its sha256 in the extended attribute `user.multimodal.sha256`. While both agree the file is as we
wrote it, so a later call may replace it; any other file is replaced with `overwrite` alone. Copies without attributes,
and file systems that have none (FAT, old NFS), are on the safe side: their files count as foreign."""

import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Literal

from multimodal.errors import UsageError
from multimodal.system.files import give_mode
from multimodal.system.signals import at_stop, unbroken

MARK = "user.multimodal.sha256"

Id = tuple[int, int]  # device and inode


class Outputs:
    """Checks of all files that one call will write, before it does any work.

    `inputs`: files that it reads, and folders; by device and inode, so links and other spellings count. No input is
    ever replaced, nor a foreign file inside an input folder."""

    def __init__(self, inputs: Iterable[str | Path] = (), overwrite: bool = False):
        self._inputs, self.overwrite = iter(inputs), overwrite
        self._ids: dict[Id, str] = {}
        self._claimed: dict[str, str] = {}

    def add_inputs(self, inputs: Iterable[str | Path]) -> None:
        self._inputs = chain(self._inputs, inputs)

    def claim(self, path: Path, name: str = "") -> Path:
        """`path`, which may be written. `name`: what a message calls it. Raises UsageError."""
        name = name or str(path)
        found = self.spare(path, name)
        if (other := self._claimed.setdefault(_full(path), name)) != name:
            raise UsageError(f"{name}: would be written over {other}")
        if found is None:
            return path
        if is_ours(path):
            return path
        if not self.overwrite:
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not as multimodal wrote it"
            raise UsageError(f"{name}: exists and is {kind}; --overwrite replaces it")
        if inside := next((self._ids[i] for i in map(_id, Path(_full(path)).parents) if i in self._ids), None):
            raise UsageError(f"{name}: exists in the input folder {inside} and is not as multimodal wrote it")
        return path

    def spare(self, path: Path, name: str = "", folder: bool = False) -> os.stat_result | None:
        """What is at `path`, if anything. Raises UsageError where that is an input, or neither a file nor a link (nor a
        folder, where the output is one)."""
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL in the name: whoever opens it says so
            return None
        except OSError as error:
            raise UsageError(f"{name or path}: cannot be written ({error.strerror})") from None
        kinds = (stat.S_ISREG, stat.S_ISLNK, stat.S_ISDIR) if folder else (stat.S_ISREG, stat.S_ISLNK)
        if not any(kind(found.st_mode) for kind in kinds):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise UsageError(f"{name or path}: cannot be written ({kind})")
        for source in self._inputs:  # once, and only where something is there to be lost
            if (known := _id(source)) is not None:
                self._ids.setdefault(known, str(source))
        if (source := self._ids.get(_id(path))) is not None:
            other = "" if str(path) == source else f" ({source})"
            raise UsageError(f"{name or path}: is an input{other}, which is never overwritten; name another output")
        return found


def write_output(path: Path, data: bytes) -> None:
    """Whole or not at all. Raises OSError naming `path`."""
    with _naming(path), opened_output(path) as file:
        file.write(data)


@contextmanager
def opened_output(path: Path, stopped: Literal["drop", "keep", "place"] = "drop") -> Iterator[IO[bytes]]:
    """A file to fill, which takes its place at `path` at the end. Where an exception ends it, what was written so far
    is dropped, kept beside `path` with a warning that names it, or takes its place. Raises OSError naming `path`."""
    with _naming(path):
        name = f"{path.name[:60]}."
        part = tempfile.NamedTemporaryFile(dir=path.parent, prefix=name, suffix=".part", delete=False)  # noqa: SIM115
        give_mode(part.name)
    try:
        with at_stop(partial(_stopped, part, path, stopped)):
            yield part
        with _naming(path):
            _put(part, path)
    except BaseException:
        if line := _stopped(part, path, stopped):
            warnings.warn(line, stacklevel=3)
        raise
    finally:
        with suppress(OSError):
            part.close()


def _stopped(part: IO[bytes], path: Path, stopped: str) -> str | None:
    with suppress(OSError):
        part.flush()
        written = os.path.getsize(part.name)
        if stopped == "place" and written:
            _put(part, path)
        elif stopped == "keep" and written:
            return f"{path}: stopped; what was written so far is in {part.name}"
    with suppress(OSError):
        os.unlink(part.name)
    return None


def _put(part: IO[bytes], path: Path) -> None:
    with unbroken():
        part.flush()
        os.fsync(part.fileno())
        with suppress(OSError, AttributeError):  # without the mark the file is a foreign one to the next call
            os.setxattr(part.fileno(), MARK, _digest(Path(part.name)))
        os.replace(part.name, path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def is_ours(path: Path) -> bool:
    """Whether a regular file is byte for byte as we wrote it."""
    try:
        return os.getxattr(path, MARK, follow_symlinks=False) == _digest(path)
    except (OSError, AttributeError):
        return False


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()


def _id(path: str | Path) -> Id | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _full(path: Path) -> str:
    return os.path.join(os.path.realpath(path.parent), path.name)
