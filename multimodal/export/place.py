"""Folders that an export writes whole, or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError, UsageError
from multimodal.system.files import read_json, replacing, sync
from multimodal.weights.files.own_parts import RECORD


def check_installed(*modules: str) -> None:
    """Raise UsageError that says what to install."""
    if missing := [name for name in modules if find_spec(name) is None]:
        raise UsageError(f"export needs {', '.join(missing)}: pip install {' '.join(missing)}")


def check_place(folder: Path, overwrite: bool) -> None:
    """Raise UsageError if `folder` exists, or with `overwrite` if it holds anything but an export."""
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise UsageError(f"{folder}: exists; overwrite=True replaces an earlier export")
    try:
        known = set(read_json(folder / RECORD).get("files") or ())
    except CheckpointError:
        known = set()
    held = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    if foreign := sorted(held - known - {RECORD}):
        raise UsageError(f"{folder}: holds {foreign[0]}, which is not part of an export; name another folder")
    if not folder.is_dir():
        raise UsageError(f"{folder}: is a file; name another folder")


@contextmanager
def export_folder(folder: Path, record: dict[str, Any], overwrite: bool) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` at the end of the block with `record` and its list of files in
    `export.json`. Raises as `check_place` does; an OSError, such as of a full disk, names `folder`."""
    check_place(folder, overwrite)
    folder = Path(os.path.realpath(folder))
    try:
        with replacing(folder) as made:
            yield made
            record["files"] = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
            (made / RECORD).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            for path in made.rglob("*"):
                sync(path)
            check_place(folder, overwrite)  # again: an export may take minutes
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from None
