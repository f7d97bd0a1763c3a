"""Crash-safe training states.

A state is a folder `state-000000500` of files and `complete.json`, which is written last and holds their sizes and
sha256. It is written under another name, fsynced and renamed, so that a kill or a full disk at any moment leaves each
state complete or absent.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError, TrainingError, UsageError, one_line
from multimodal.system.files import inside, read_json, sha256, sync
from multimodal.system.records import from_record
from multimodal.weights.files.archives import read_archive

log = logging.getLogger(__name__)

FORMAT = 1
MARKER = "complete.json"


@dataclass(frozen=True)
class FileSum:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """Contents of `complete.json`: the state's files by name."""

    format: int
    step: int
    files: dict[str, FileSum]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise CheckpointError(f"format must be {FORMAT} (got {self.format})")


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder in which the state of `step` is written."""
    return folder / f".state-{step:09d}.partial"


@contextlib.contextmanager
def saving(folder: Path, step: int, keep: int = 2) -> Iterator[Path]:
    """Yield an empty folder for the files of a state; on exit complete it and remove all states but the newest `keep`.
    Raises TrainingError if the disk is full or cannot be written; earlier states stay."""
    place, part = folder / f"state-{step:09d}", partial_folder(folder, step)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".state-*.partial"):  # of a save that was killed
            shutil.rmtree(left)
        part.mkdir()
        yield part
        _complete(part, step)
        if place.exists():  # damaged, or of a run that was resumed before it
            _remove(place)
        part.rename(place)
        sync(folder)
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        shutil.rmtree(part, ignore_errors=True)
        raise TrainingError(f"{place}: the state cannot be saved: {_cause(error)}") from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    states = saved_states(folder)
    after = [path for path in states if path.name > place.name]  # damaged: the run resumed from an earlier one
    for old in after + [path for path in states if path not in after][: -max(keep, 1)]:
        try:
            _remove(old)
        except OSError as error:  # the run does not end for it
            log.warning("%s: cannot be removed: %s", old, error.strerror)


def save_state(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> None:
    """Save tensors, numbers, strings, lists and dicts as one file. Raises TrainingError as `saving` does."""
    with saving(folder, step, keep) as part:
        with (part / "state.pt").open("wb") as file:
            torch.save(state, file)


def saved_states(folder: Path) -> list[Path]:
    """Return the folders of states by step, unchecked."""
    return sorted(path for path in folder.glob("state-*") if path.is_dir())


def refuse_states(folder: Path) -> None:
    """Raise UsageError if a run has saved states, which a new run would mix with its own."""
    if old := saved_states(folder):
        more = "continue it with --resume or name a new folder"
        raise UsageError(f"{folder.parent}: already holds {old[-1].name}; {more}", argument="run")


def read_state(path: Path) -> dict[str, Any]:
    """Read a state as data, on the CPU. Raises CheckpointError."""
    return read_archive(path / "state.pt")


def newest_state(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Read the newest intact state and its folder, skipping damaged ones with a warning; None without states. Raises
    CheckpointError if none can be read."""
    states = saved_states(folder)
    for path in reversed(states):
        try:
            check(path)
            return path, read_state(path)
        except Exception as error:  # a damaged file may raise almost anything
            cause = one_line(error)
            log.warning("%s: damaged, trying the one before: %s", path, cause)
    if states:
        raise CheckpointError(f"{folder}: none of {len(states)} saved states can be read")
    return None


def check(path: Path) -> None:
    """Raises CheckpointError if a file of the state is missing or its sha256 differs."""
    marker = path / MARKER
    if not marker.is_file():
        raise CheckpointError(f"{marker}: missing")
    for name, known in from_record(Marker, read_json(marker), str(marker)).files.items():
        file = inside(path, name, str(marker))
        if not file.is_file():
            raise CheckpointError(f"{file}: missing")
        if file.stat().st_size != known.bytes or sha256(file) != known.sha256:
            raise CheckpointError(f"{file}: its sha256 differs from the one in {MARKER}")


def _cause(error: BaseException) -> str:
    """Return the system's reason, such as "No space left on device", which torch's writer hides."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__context__
    return (inner and inner.strerror) or one_line(error)


def _complete(part: Path, step: int) -> None:
    files = {}
    for file in sorted(path for path in part.rglob("*") if path.is_file()):
        sync(file)
        name = file.relative_to(part).as_posix()
        files[name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    marker = part / MARKER
    marker.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8")
    sync(marker)
    for inner in (path for path in part.rglob("*") if path.is_dir()):
        sync(inner)
    sync(part)


def _remove(path: Path) -> None:
    """Rename, then delete, so that a kill half-way leaves no damaged state. What a link leads to stays."""
    if path.is_symlink():
        return path.unlink()
    gone = path.with_name(f".{path.name}.old.partial")
    path.rename(gone)
    shutil.rmtree(gone)
