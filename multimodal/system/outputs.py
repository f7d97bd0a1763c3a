"""Output files, which never replace an input, and a foreign or edited file only with `overwrite`.

Each output carries its sha256 in the extended attribute `user.multimodal.sha256`. While it matches, later calls may
replace the file. Copies and file systems without attributes (FAT, old NFS) count as foreign."""

import os
import stat
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Literal

from multimodal.errors import UsageError
from multimodal.system.files import give_mode, sha256
from multimodal.system.signals import at_stop, unbroken

MARK = "user.multimodal.sha256"

Id = tuple[int, int]  # device and inode


class Outputs:
    """Check every file that a call will write, before it does any work.

    `inputs`: files and folders that the call reads, compared by device and inode. No input is ever replaced, nor a
    foreign file inside an input folder."""

    def __init__(self, inputs: Iterable[str | Path] = (), overwrite: bool = False):
        self._inputs, self.overwrite = iter(inputs), overwrite
        self._ids: dict[Id, str] = {}
        self._claimed: dict[str, str] = {}

    def claim(self, path: Path, name: str = "") -> Path:
        """Return `path` if it may be written. `name`: for messages. Raises UsageError."""
        name = name or str(path)
        status = self.spare(path, name)
        if (other := self._claimed.setdefault(_full(path), name)) != name:
            raise UsageError(f"{name}: would be written over {other}")
        if status is None or is_ours(path):
            return path
        if not self.overwrite:
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not as multimodal wrote it"
            raise UsageError(f"{name}: exists and is {kind}; overwrite=True replaces it")
        if inside := next((self._ids[i] for i in map(_id, Path(_full(path)).parents) if i in self._ids), None):
            raise UsageError(f"{name}: exists in the input folder {inside} and is not as multimodal wrote it")
        return path

    def spare(self, path: Path, name: str = "", folder: bool = False) -> os.stat_result | None:
        """The status of what is at `path`, if anything. Raises UsageError for an input and for anything but a file, a
        link or, with `folder`, a folder."""
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL, which open() reports
            return None
        except OSError as error:
            raise UsageError(f"{name or path}: cannot be written ({error.strerror})") from None
        device = stat.S_ISLNK(status.st_mode) and os.path.dirname(_full(path)) == "/dev"  # root may write there
        kinds = (stat.S_ISREG, stat.S_ISLNK, stat.S_ISDIR) if folder else (stat.S_ISREG, stat.S_ISLNK)
        if device or not any(kind(status.st_mode) for kind in kinds):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise UsageError(f"{name or path}: cannot be written ({kind})")
        for source in self._inputs:  # an iterator: listed once, and only if a file could be lost
            if (known := _id(source)) is not None:
                self._ids.setdefault(known, str(source))
        if (source := self._ids.get(_id(path))) is not None:
            other = "" if str(path) == source else f" ({source})"
            raise UsageError(f"{name or path}: is an input{other}, which is never overwritten; name another output")
        return status


def write_output(path: Path, data: bytes) -> None:
    """Write atomically. Raises OSError that names `path`."""
    with naming(path), opened_output(path) as file:
        file.write(data)


@contextmanager
def opened_output(path: Path, stopped: Literal["drop", "keep", "place"] = "drop") -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` at the end of the block. `stopped`: after an exception, drop the
    partial file, keep it beside `path` with a warning, or place it. Raises OSError that names `path`."""
    import tempfile  # slow: not for --help

    with naming(path):
        name = f"{path.name[:60]}."
        part = tempfile.NamedTemporaryFile(dir=path.parent, prefix=name, suffix=".part", delete=False)  # noqa: SIM115
        give_mode(part.name)
    try:
        with at_stop(partial(_stopped, part, path, stopped)):
            yield part
        with naming(path):
            place(part, path)
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
            place(part, path)
        elif stopped == "keep" and written:
            return f"{path}: stopped; what was written so far is in {part.name}"
    with suppress(OSError):
        os.unlink(part.name)
    return None


def place(part: IO[bytes], path: Path) -> None:
    """Move an open temporary file to `path`, marked as ours. Raises OSError."""
    with unbroken():
        part.flush()
        os.fsync(part.fileno())
        with suppress(OSError, AttributeError):  # without the mark the next call takes the file for a foreign one
            os.setxattr(part.fileno(), MARK, sha256(Path(part.name)).encode())
        os.replace(part.name, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def is_ours(path: Path) -> bool:
    """Return True if a regular file is byte for byte as we wrote it."""
    try:
        return os.getxattr(path, MARK, follow_symlinks=False) == sha256(path).encode()
    except (OSError, AttributeError):
        return False


def _id(path: str | Path) -> Id | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _full(path: Path) -> str:
    return os.path.join(os.path.realpath(path.parent), path.name)
