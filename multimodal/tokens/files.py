"""Files as the project opens them, regular ones only, since a pipe would be waited for without end; and writes them."""

import io
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, MultimodalError


def open_media(source: str | Path | bytes, name: str, error: type[MultimodalError]) -> io.BufferedIOBase:
    """A picture's or recording's bytes. Raises `error` for a folder, a missing, empty or irregular file."""
    if isinstance(source, bytes):
        if not source:
            raise error(f"{name}: empty (0 bytes)")
        return io.BytesIO(source)
    path = Path(source)
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise error(f"{name}: a folder (name its files)")
        if not stat.S_ISREG(found.st_mode):
            raise error(f"{name}: not a regular file (device, pipe or socket)")
        if not found.st_size:
            raise error(f"{name}: empty file (0 bytes)")
        return path.open("rb")
    except FileNotFoundError:
        raise error(f"{name}: no such file (cannot be opened)") from None
    except OSError as cause:
        raise error(f"{name}: cannot be opened ({cause.strerror})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming it when it is missing or no such thing."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file (device, pipe or socket)")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else error
        raise CheckpointError(f"{path}: cannot be read as JSON ({reason})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object ({str(value)[:40]})")
    return value


def write_whole(path: Path, data: bytes) -> None:
    """A crash leaves the old file or the new one, never a part. Raises OSError naming `path`."""
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False, suffix=".part") as part:
            part.write(data)
            part.flush()
            os.fsync(part.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part.name, 0o666 & ~umask)  # a temporary file is private; an output is like any other
        os.replace(part.name, path)
    except BaseException as error:
        if part is not None:
            Path(part.name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
