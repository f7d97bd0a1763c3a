"""Journals of transcriptions, beside their outputs: a stopped command continues after the last finished window."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from multimodal.cli.output import printable
from multimodal.errors import AudioError
from multimodal.system.assets import model_path
from multimodal.system.files import open_media
from multimodal.system.journal import Journal
from multimodal.system.records import to_record
from multimodal.system.signals import at_stop
from multimodal.tasks.encode.features import model_digest
from multimodal.tasks.encode.loaded import device_of
from multimodal.tasks.transcribe.options import options_for
from multimodal.weights.folder import Checkpoint

LONGEST = 200  # bytes of a stem; names of files have up to 255, with .transcript.part.lock
ANY_VALUE = ("batch_size", "on_truncated")  # the text does not depend on these


def journal_path(folder: Path, file: Path) -> Path:
    name = os.fsencode(file.stem)
    if len(name) > LONGEST:
        return folder / f"{hashlib.sha256(name).hexdigest()[:32]}.transcript.part"
    return folder / f"{file.stem}.transcript.part"


class Journals:
    """The open journals of a command's recordings. `names`: of the files, for messages. `say` prints a line."""

    def __init__(
        self, folder: Path, names: Mapping[Path, str], checkpoint: Checkpoint, given: Mapping[str, Any],
        say: Callable[[str], None],
    ):  # fmt: skip
        from multimodal import __version__

        self.folder, self.names, self.say = folder, names, say
        options = vars(options_for(checkpoint, given))
        chosen = {name: value for name, value in options.items() if name not in ANY_VALUE}
        chosen |= {"device": str(device_of(chosen["device"], checkpoint))}
        if lm := chosen.get("lm"):
            chosen["lm"] = _stamps(model_path(lm))
        self.settings = {"multimodal": __version__, "model": _identity(checkpoint), "options": chosen}
        self.opened: dict[Path, Journal] = {}

    def __enter__(self) -> "Journals":
        self.stopped = at_stop(self._kept)
        self.stopped.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.__exit__(None, None, None)
        for file in list(self.opened):
            self.close(file, finished=False)

    def open(self, file: Path) -> Journal:
        """Raises UsageError, AudioError."""
        with open_media(file, self.names[file], AudioError) as audio:
            recording = hashlib.file_digest(audio, "sha256").hexdigest()
        journal = Journal(journal_path(self.folder, file), {**self.settings, "recording": recording})
        self.opened[file] = journal
        if journal.count:
            self.say(f"{self.names[file]}: continuing after {journal.count} finished windows ({journal.path})")
        return journal

    def close(self, file: Path, finished: bool) -> None:
        if journal := self.opened.pop(file, None):
            journal.close(finished)

    def _kept(self) -> str | None:
        """After a stop: what the journals hold."""
        lines = []
        for file, journal in list(self.opened.items()):
            if journal.count:
                kept = f"{self.names[file]}: {journal.count} finished windows kept in {journal.path}"
                lines.append(f"multimodal: {printable(kept)}; the same command continues after them")
            journal.close(finished=False)
        return "\n".join(lines) or None


def _identity(checkpoint: Checkpoint) -> list[Any]:
    """Stamps of the model's files, since a digest of its tensors takes a second for 2 GB, and its configuration."""
    path = model_path(checkpoint.source)
    return [_stamps(path) if path.exists() else model_digest(checkpoint), to_record(checkpoint.model.config)]


def _stamps(path: Path) -> list[Any]:
    """Name, size and time of a file, or of those in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]
