"""Open, read and write files: regular files only, since a pipe could block without end."""

import codecs
import gc
import io
import json
import math
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from reprlib import Repr
from typing import Any, Never

from multimodal.errors import CheckpointError, MultimodalError, UsageError
from multimodal.system.signals import at_stop, unbroken

MOST_JSON = 64 << 20  # bytes; the longest vocabularies of the hub have 33 MB
MOST_NAME = 400  # characters of a path in an error
MOST_DEPTH = 64  # nested arrays and objects
_DIGITS = 40  # of a whole number; transformers writes 10**30 for "no limit"
_short = Repr()
_short.maxlevel = _short.maxlist = _short.maxdict = _short.maxtuple = 4
_short.maxstring = _short.maxother = _short.maxlong = 40


def shown(value: Any) -> str:
    """Short printable form of any value."""
    return printable(_short.repr(value))[:80]


def printable(text: str) -> str:
    """Text on one line, with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str, end: str = "\n") -> None:
    """Print on stderr. A closed terminal, a broken pipe or a full disk loses the text, not the work."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def source_name(source: Any) -> str:
    """Name of a path in errors: on one line, a very long one shortened."""
    text = str(source).replace("\n", "\\n")
    return text if len(text) <= MOST_NAME else f"{text[:200]}…{text[-100:]}"


def path_of(source: Any, error: type[MultimodalError], name: str = "path") -> Path:
    """`source` as a Path. Raises `error` for another type, an empty path, a NUL or a lone surrogate."""
    if not isinstance(source, str | os.PathLike):
        raise error(f"{name}: expected a path ({shown(source)})")
    text = os.fspath(source)
    if not isinstance(text, str) or not text:
        raise error(f"{name}: expected a path ({shown(text)})")
    try:
        if b"\0" in os.fsencode(text):
            raise error(f"{name}: a path cannot hold a NUL ({shown(text)})")
    except UnicodeEncodeError:
        raise error(f"{name}: a path cannot hold a lone surrogate ({shown(text)})") from None
    return Path(source)


def inside(folder: Path, name: str, where: str) -> Path:
    """Path of the file `name` in or below `folder`. Raises CheckpointError that begins with `where` for a name that
    leads outside. Links may do so: the hub's cache consists of them."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in name or "\0" in name or len(name) > MOST_NAME:
        raise CheckpointError(f"{where}: {shown(name)} names no file in {folder}")
    return folder / name


def is_data_url(value: object) -> bool:
    return isinstance(value, str) and value[:5].lower() == "data:"


def open_media(source: str | Path | bytes, name: str, error: type[MultimodalError]) -> io.BufferedIOBase:
    """Open an image or audio file. Raises `error` for a folder, and a missing, empty or irregular file."""
    if isinstance(source, bytes):
        if not source:
            raise error(f"{name}: empty (0 bytes)")
        return io.BytesIO(source)
    path = path_of(source, error, name)
    if is_data_url(name) and not os.path.exists(path):
        raise error(f"{name}: data URLs are not read (pass the bytes)")
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise error(f"{name}: a folder (name its files)")
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{name}: not a regular file (device, pipe or socket)")
        if not status.st_size:
            raise error(f"{name}: empty file (0 bytes)")
        return path.open("rb")
    except FileNotFoundError:
        raise error(f"{name}: no such file (cannot be opened)") from None
    except OSError as cause:
        raise error(f"{name}: cannot be opened ({cause.strerror})") from None


def read_text_lines(path: str | Path, name: str) -> list[str]:
    """The lines of a text file in UTF-8. Raises UsageError that begins with `name`: what the file is for."""
    if not str(path) or (Path(path).exists() and not Path(path).is_file()):
        raise UsageError(f"{name} {str(path)!r}: not a regular file (folders, pipes and devices are not read)")
    try:
        return Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines() would also cut at U+2028
    except OSError as error:
        raise UsageError(f"{name} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UsageError(f"{name} {path}: is not UTF-8 text (byte {error.start} is {byte:#x})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object (got {shown(value)})")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no such file. Raises CheckpointError, also for a pipe or a folder."""
    return read_json(path) if path.exists() else {}


def read_json_value(path: Path) -> Any:
    """The JSON value in a file. Raises CheckpointError."""
    path = path_of(path, CheckpointError)
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: not a regular file (device, pipe or socket)")
        with path.open("rb") as file:
            data = file.read(MOST_JSON + 1)
    except OSError as cause:
        reason = "missing" if isinstance(cause, FileNotFoundError) else cause.strerror or cause
        raise CheckpointError(f"{path}: cannot be read as JSON ({reason})") from None
    return parse_json(data, str(path))


def parse_json(data: bytes | str, where: str, error: type[MultimodalError] = CheckpointError) -> Any:
    """Parse as `strict_json` does. Raises `error` with `where` and the cause."""
    try:
        return strict_json(data)
    except UnicodeDecodeError as cause:
        byte = cause.object[cause.start]
        raise error(f"{where}: not UTF-8 text (byte {cause.start} is {byte:#04x})") from None
    except ValueError as cause:
        raise error(f"{where}: cannot be read as JSON ({cause})") from None


def strict_json(data: bytes | str, halves: bool = False) -> Any:
    """Parse JSON strictly. Raises ValueError for invalid JSON or UTF-8, more than `MOST_JSON` bytes or `MOST_DEPTH`
    levels, repeated keys, NaN, infinity and integers of more than 40 digits; without `halves` also for lone surrogates
    other than those that stand for the bytes of a file name."""
    if len(data) > MOST_JSON:
        raise ValueError(f"more than {MOST_JSON >> 20} MB")
    text = data.removeprefix(codecs.BOM_UTF8).decode() if isinstance(data, bytes) else data
    collected = gc.isenabled()
    gc.disable()  # finalizers fail, and say so on stderr, where nested text has used up the stack
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MOST_DEPTH}") from None
    except ValueError as cause:
        raise ValueError(printable(str(cause))[:120]) from None
    finally:
        if collected:
            gc.enable()
    escapes = "\\u" in text and not halves
    if (escapes or text.count("[") + text.count("{") > MOST_DEPTH) and (fault := _fault(value, escapes)):
        raise ValueError(fault)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"repeated key {shown(twice)}")
    return made


def _refuse(name: str) -> Never:
    raise ValueError(f"{name} is not valid JSON")


def _int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse, parse_int=_int, parse_float=_float)


def _fault(value: Any, escapes: bool) -> str:
    """Describe excessive depth or, with `escapes`, a lone surrogate in a parsed value; '' if there is none."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        if escapes:
            texts = (item for part in level for item in ([*part, *part.values()] if isinstance(part, dict) else [part]))
            if wrong := next((text for text in texts if isinstance(text, str) and _is_half(text)), None):
                return f"a lone surrogate in {shown(wrong)}"
        inner = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [item for part in inner for item in part if escapes or isinstance(item, dict | list)]
        if not level:
            return ""
    return f"nested deeper than {MOST_DEPTH}"


def _is_half(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= c < "\udc80" or "\udcff" < c <= "\udfff" for c in text)


def write_whole(path: Path, data: bytes) -> None:
    """Write atomically: a crash leaves the old file or the new one. Raises OSError that names `path`."""
    with unbroken():
        _write_whole(path, data)


def _write_whole(path: Path, data: bytes) -> None:
    import tempfile  # slow: not for --help

    part = None
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name[:60]}.", suffix=".part", delete=False
        ) as part:
            part.write(data)
            part.flush()
            os.fsync(part.fileno())
        give_mode(part.name)
        os.replace(part.name, path)
    except BaseException as error:
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def append_whole(path: Path, data: bytes, at: int | None = None) -> None:
    """Append to a file, or replace what follows its byte `at`. An error leaves none of `data`. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        at = os.lseek(file, 0 if at is None else at, os.SEEK_END if at is None else os.SEEK_SET)
        os.ftruncate(file, at)
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        if at is not None:
            with suppress(OSError):
                os.ftruncate(file, at)
        raise
    finally:
        os.close(file)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` at the end; after an error `folder` is as before."""
    import shutil  # slow: not for --help
    import tempfile

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name[:60]}.", dir=folder.parent))
    try:
        made.chmod(0o755)
        with at_stop(partial(shutil.rmtree, made, ignore_errors=True)):
            yield made
            with unbroken():
                _replace_folder(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _replace_folder(made: Path, folder: Path) -> None:
    import shutil  # slow: not for --help

    if not folder.exists():
        made.rename(folder)
        return sync(folder.parent)
    old = made
    if not _exchange(made, folder):
        old = made.with_name(made.name + ".old")
        folder.rename(old)
        try:
            made.rename(folder)
        except OSError:
            old.rename(folder)
            raise
    sync(folder.parent)
    shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once, so that a kill between two renames loses none. False where the system cannot."""
    import ctypes  # slow: not for --help

    call = getattr(ctypes.CDLL(None), "renameat2", None)  # of glibc 2.28
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def sync(path: Path) -> None:
    """Wait until the disk holds a file's bytes, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    import hashlib  # slow: not for --help

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def give_mode(path: str) -> None:
    """Set the permissions that the umask gives; temporary files are private."""
    os.chmod(path, 0o666 & ~_umask())


def _umask() -> int:
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_bytes()
        return int(status.partition(b"\nUmask:")[2].split()[0], 8)
    umask = os.umask(0o077)  # elsewhere than on Linux, it is read by setting it, for the files of other threads too
    os.umask(umask)
    return umask


def cache_folder() -> Path:
    """Folder of what may be deleted at any time: $MULTIMODAL_CACHE, else `multimodal` in the user's cache folder.
    Raises UsageError without a home."""
    if own := os.environ.get("MULTIMODAL_CACHE"):
        return Path(os.path.expanduser(own))
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multimodal"
    except RuntimeError:
        raise UsageError("no home folder for the cache (MULTIMODAL_CACHE names another folder)") from None


LIBRARIES = ["multimodal", "torch", "torchvision", "torchaudio", "timm", "numpy", "tokenizers", "av", "pillow"]


def versions() -> dict[str, str]:
    """Versions of Python, the machine and the libraries that results may depend on."""
    import platform  # slow, as metadata: not for --help
    from importlib import metadata

    names = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            names[name] = metadata.version(name)
    return names
