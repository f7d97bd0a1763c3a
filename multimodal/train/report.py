"""Report of a run: curves, examples, and what reproduces it (command, settings, versions, data hashes)."""

import dataclasses
import hashlib
import io
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multimodal.data.sources import expanded
from multimodal.system.files import versions
from multimodal.system.outputs import write_output

log = logging.getLogger(__name__)

WHOLE = 1 << 30  # bytes; of a larger file the size, the first and the last MiB are hashed
PART = 1 << 20


def fingerprint(path: Path) -> str:
    """Return `sha256:` of a file's bytes (`sampled-sha256:` over 1 GiB), or `listing-sha256:` of a folder's file names
    and sizes."""
    digest = hashlib.sha256()
    if path.is_dir():
        for folder, inner, files in os.walk(path):
            inner.sort()
            for name in sorted(files):
                file = Path(folder, name)
                digest.update(f"{file.relative_to(path)}\0{file.stat().st_size}\n".encode())
        return f"listing-sha256:{digest.hexdigest()}"
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest.update(f"{size}".encode() + file.read(PART))
        file.seek(-PART, os.SEEK_END)
        digest.update(file.read(PART))
    return f"sampled-sha256:{digest.hexdigest()}"


def data_hashes(sources: Iterable[str | Path]) -> dict[str, str]:
    """Return fingerprints of local files and folders, with patterns expanded; URLs are not read again."""
    parts = [part for source in sources for part in expanded(str(source))]
    return {part: fingerprint(Path(part)) if Path(part).exists() else "not local" for part in parts}


def plain(value: Any) -> Any:
    """Convert settings to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def curves(rows: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    """Plot losses, learning rate and evaluations, one panel each; return their names."""
    names = sorted({n for row in rows for n in row if n == "lr" or n.endswith("loss") or n.startswith("eval/")})
    if not names:
        return []
    from matplotlib.figure import Figure

    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(4 * columns, 2.8 * lines), layout="constrained")
    for number, name in enumerate(names, 1):
        axes = figure.add_subplot(lines, columns, number)
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    data = io.BytesIO()
    figure.savefig(data, dpi=100, format=path.suffix[1:])
    write_output(path, data.getvalue())
    return names


def write_report(
    run: Path, settings: Any, sources: Iterable[str | Path] = (), examples: Sequence[str] = (),
    command: Sequence[str] | None = None,
) -> Path:  # fmt: skip
    """Write report.md, curves.png and run.json to `run/report/` from `run/metrics.jsonl`; return report.md's path."""
    folder = run / "report"
    log.info("writing %s", folder / "report.md")
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_metrics(run / "metrics.jsonl")
    line = shlex.join(command if command is not None else [Path(sys.executable).name, *sys.argv])
    facts = {"command": line, "settings": plain(settings), "versions": versions(), "data": data_hashes(sources)}
    write_output(folder / "run.json", (json.dumps(facts, indent=2) + "\n").encode())
    last: dict[str, Any] = {}
    for row in rows:
        last |= row
    text = ["# Training report", "", "```sh", line, "```", ""]
    if curves(rows, folder / "curves.png"):
        text += ["![curves](curves.png)", ""]
    text += ["| figure | last value |", "|---|---|"]
    text += [f"| {name} | {value:.6g} |" for name, value in last.items()]
    if examples:
        text += ["", "## Examples", "", *(f"- {' '.join(example.split())}" for example in examples)]
    text += ["", "## Data", "", *(f"- `{name}`: {sum_}" for name, sum_ in facts["data"].items())]
    text += ["", "## Versions", "", *(f"- {name} {version}" for name, version in facts["versions"].items())]
    text += ["", "## Settings", "", "```json", json.dumps(facts["settings"], indent=2), "```", ""]
    write_output(folder / "report.md", "\n".join(text).encode(errors="backslashreplace"))
    return folder / "report.md"
