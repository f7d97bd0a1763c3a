"""Many files by the command, and through Ray Data by `recipes/batch_ray.py`: whole processes with the shipped models.
Each run returns the label or text of every file, in order of the names."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.process import ROOT

LABELS = ("a dog", "a cat", "a ship", "a person", "a mountain", "a street", "food", "a diagram")
SECONDS = 5  # of a recording
ROWS = 32  # files per shard


def images(folder: Path, device: str, count: int, **other: Any) -> None:
    from benchmarks.peers.vision import clip_jpegs

    (folder / "data").mkdir()
    clip_jpegs.prepare(folder / "data", device, count, (400, 300))


def recordings(folder: Path, device: str, count: int, **other: Any) -> None:
    """The sample's sentences, each recording from another moment on."""
    from benchmarks.peers.speech.whisper_random import RATE, save_wave, speech

    (folder / "data").mkdir()
    sample = speech(60)
    for number in range(count):
        start = number * RATE // 4 % (len(sample) - SECONDS * RATE)
        save_wave(folder / "data" / f"{number:04}.wav", sample[start : start + SECONDS * RATE])


def plain(folder: Path, device: str, task: str, **other: Any) -> Callable[[], list[str]]:
    out = folder / "plain"
    words = {
        "classify": ["--labels", *LABELS, "--top", "1", "-o", str(out / "o.jsonl")],
        "transcribe": ["-o", str(out), "-f", "json", "--verbose", "None"],
    }[task]
    run = [sys.executable, "-m", "multimodal", task, str(folder / "data"), *words]

    def found() -> Iterator[tuple[str, str]]:
        if task == "transcribe":
            for path in out.glob("*.json"):
                yield path.stem, json.loads(path.read_text())["text"]
        else:
            for row in _rows(out / "o.jsonl"):
                yield Path(row["file"]).stem, row["scores"][0]["label"]

    return lambda: _run(run, out, found)


def through_ray(folder: Path, device: str, task: str, actors: int, **other: Any) -> Callable[[], list[str]]:
    import ray  # noqa: F401 (says that it is missing)

    out = folder / "ray"
    words = ["--labels", *LABELS] if task == "classify" else []
    run = [sys.executable, str(ROOT / "recipes" / "batch_ray.py"), "--task", task, "--data", str(folder / "data"),
           "--output", str(out), "--format", "jsonl", "--rows", str(ROWS), "--actors", str(actors), *words]  # fmt: skip
    key = {"classify": "label", "transcribe": "text"}[task]

    def found() -> Iterator[tuple[str, str]]:
        for path in out.glob("*.jsonl"):
            yield from ((Path(row["file"]).stem, row[key]) for row in _rows(path))

    return lambda: _run(run, out, found)


def _run(command: Sequence[str], out: Path, found: Callable[[], Iterator[tuple[str, str]]]) -> list[str]:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.DEVNULL)
    return [value for _, value in sorted(found())]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
