"""Studies: cells that are computed once and kept, and tables with the spread of seeds."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from multimodal.errors import DataError, UsageError
from multimodal.system.outputs import write_output

Row = Sequence[str]


class Study:
    """Cells of a study in a folder: `cells/NAME.json` once finished, the folder `cells/NAME` while computed.

    `settings` shape the results. Raises UsageError for a folder with cells without `resume`, or with cells of other
    settings, and DataError for one that cannot be read."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], resume: bool):
        self.folder, self.cells = folder, folder / "cells"
        self.settings = json.loads(json.dumps(settings, default=str))
        old = self._read(folder / "settings.json") if (folder / "settings.json").exists() else None
        if old is not None and not resume:
            raise UsageError(f"{folder}: holds a study; resume it, or name a new folder", argument="run")
        if old is not None and old != self.settings:
            names = [name for name in sorted({*old, *self.settings}) if old.get(name) != self.settings.get(name)]
            changes = [f"{name} {self.settings.get(name)} (was {old.get(name)})" for name in names]
            raise UsageError(f"{folder}: holds cells of other settings: {', '.join(changes)}", argument="run")
        self.cells.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "settings.json", self.settings)

    def cell(self, name: str, compute: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of a cell; `compute` it in a folder of its own, unless it is finished."""
        done = self.cells / f"{name}.json"
        if not done.exists():
            _write_json(done, compute(self.cells / name))
        shutil.rmtree(self.cells / name, ignore_errors=True)
        return self._read(done)

    def write(self, record: Mapping[str, Any], tables: Sequence[Sequence[str]]) -> None:
        """Write `study.json` and the lines of the tables as `study.md`."""
        _write_json(self.folder / "study.json", {"settings": self.settings, **record})
        write_output(self.folder / "study.md", "\n\n".join("\n".join(lines) for lines in tables).encode() + b"\n")

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); delete it to compute it again") from None


def _write_json(path: Path, record: Any) -> None:
    write_output(path, (json.dumps(record, indent=1) + "\n").encode())


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean of the seeds ± half of their range."""
    half = (max(values) - min(values)) / 2
    return f"{mean(values):.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{values[0]:.{digits}f}"


def table(head: Row, rows: Sequence[Row]) -> list[str]:
    """Lines of a markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
