"""End of a run: its checkpoint, and a report of curves, examples and what reproduces it (command, settings, versions,
data hashes)."""

import dataclasses
import hashlib
import io
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from multimodal.data.shards import expanded
from multimodal.system.files import sha256, versions
from multimodal.system.outputs import write_output
from multimodal.tasks.figures import contact_sheet, new_figure, png
from multimodal.tasks.report.media import grid, thumbnail
from multimodal.tasks.report.page import Section, data_uri, escaped, facts_section, pre, write_page
from multimodal.tokens.image.reading import read_image
from multimodal.train.checkpoint.best import save_checkpoint
from multimodal.weights.files.store_options import Store
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)

WHOLE = 1 << 30  # bytes; of a larger file the size, the first and the last MiB are hashed
PART = 1 << 20
WIDEST = 1600  # pixels of an image in a page


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
    if (size := path.stat().st_size) <= WHOLE:
        return f"sha256:{sha256(path)}"
    with path.open("rb") as file:
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


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
    """A PNG each of losses, learning rate and evaluations."""
    names = sorted({n for row in rows for n in row if n == "lr" or n.endswith("loss") or n.startswith("eval/")})
    made = {}
    for name in names:
        figure = new_figure((4, 2.8), dpi=130)
        axes = figure.add_subplot()
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 30 else None)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
        made[name] = png(figure)
    return made


def _curves_section(panels: Mapping[str, bytes]) -> Section:
    images = (f"<img class=plot alt='{escaped(name)}' src='{data_uri(data, 'image/png')}'>"
              for name, data in panels.items())  # fmt: skip
    return Section("Curves", image="curves.png", html=lambda: grid(images, "plots"))


def _image_section(folder: Path, name: str) -> Section:
    """A PNG or JPEG beside the page, which HTML holds as a copy of at most WIDEST pixels."""
    section = Section(Path(name).stem.capitalize(), image=name)
    return replace(section, html=lambda: f"<img alt='' src='{thumbnail(read_image(folder / name), WIDEST)}'>")


def write_report(
    run: Path, settings: Any, sources: Iterable[str | Path] = (), examples: Sequence[str] = (),
    command: Sequence[str] | None = None, images: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write report.html, report.md, curves.png and run.json to `run/report/` from `run/metrics.jsonl`; return
    report.md's path. `images`: names of files in that folder to show."""
    folder = run / "report"
    log.info("writing %s", folder / "report.html")
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_metrics(run / "metrics.jsonl")
    line = shlex.join(command if command is not None else [Path(sys.executable).name, *sys.argv])
    facts = {"command": line, "settings": plain(settings), "versions": versions(), "data": data_hashes(sources)}
    write_output(folder / "run.json", (json.dumps(facts, indent=2) + "\n").encode())
    last = {name: value for row in rows for name, value in row.items()}
    panels, text = curves(rows), json.dumps(facts["settings"], indent=2)
    if panels:
        write_output(folder / "curves.png", contact_sheet([Image.open(io.BytesIO(one)) for one in panels.values()], 3))
    sections = [
        Section("Command", lines=[line]),
        *([_curves_section(panels)] if panels else []),
        *(_image_section(folder, name) for name in images),
        Section("Figures", [("figure", "last value"), *((name, f"{value:.6g}") for name, value in last.items())]),
        *([Section("Examples", lines=[" ".join(example.split()) for example in examples])] if examples else []),
        Section("Data", lines=[f"{name}: {digest}" for name, digest in facts["data"].items()]),
        Section("Settings", lines=text.splitlines(), html=lambda: pre(text)),
        facts_section({}),
    ]
    for name in ("report.html", "report.md"):
        write_page(folder / name, "Training report", sections)
    return folder / "report.md"


def finish(
    settings: Any, checkpoint: Checkpoint, sources: Iterable[str | Path | None], examples: Iterable[str] = (), *,
    figures: Mapping[str, Any] | None = None, store: Store = "float32", images: Sequence[str] = (),
    run: Path | None = None,
) -> None:  # fmt: skip
    """Save the checkpoint of a recipe to `settings.out`, log its figures, and write the report of `settings.loop.run`
    or `run`. Sources that are None are skipped."""
    save_checkpoint(checkpoint, settings.out, store)
    if figures:
        log.info("%s: %s", settings.out, figures)
    sources = [source for source in sources if source is not None]
    write_report(run or settings.loop.run, settings, sources, list(examples), images=images)
