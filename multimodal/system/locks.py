"""Locks of outputs: one process at a time writes a file or a folder. A killed process lets go of its locks."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from multimodal.errors import UsageError


def lock(path: Path, file: Path, argument: str | None = None) -> Any:
    """Lock `file` for the writer of `path`; None where the file system has no locks. Raises UsageError if another
    process holds it, or it cannot be written."""
    from filelock import FileLock, Timeout  # slow: not for --help

    made = FileLock(file, timeout=0, thread_local=False)
    try:
        made.acquire()
    except Timeout:
        raise UsageError(f"{path}: in use by another process, which writes the same output", argument) from None
    except NotImplementedError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})", argument) from None
    return made


def unlock(held: Any) -> None:
    """Remove the file of a lock and let others in."""
    if held is not None:
        with suppress(OSError):
            os.unlink(held.lock_file)
        held.release()
