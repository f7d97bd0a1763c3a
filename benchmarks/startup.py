"""Seconds from a cold start: the import, --help, the first classification and the first transcription.

    python benchmarks/startup.py

Each command is its own process; the commands take turns, so that drift of the machine's speed falls on all alike.
Medians over the rounds are printed and kept in `startup.json` beside this file, each also as a ratio to
`import torch`.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROUNDS = 7
HERE = Path(__file__).resolve().parent


def commands(folder: Path) -> dict[str, list[str]]:
    picture = folder / "picture.png"
    Image.effect_mandelbrot((640, 480), (-2, -1, 1, 1), 60).convert("RGB").save(picture)
    run, cli = [sys.executable, "-c"], [sys.executable, "-m", "multimodal"]
    speech = HERE.parent / "assets" / "sample" / "speech.flac"
    return {
        "python": [*run, "pass"],
        "import torch": [*run, "import torch"],
        "import multimodal": [*run, "import multimodal"],
        "multimodal --help": [*cli, "--help"],
        "first classification": [*cli, "classify", str(picture), "--labels", "lighthouse", "goldfish"],
        "first transcription": [*cli, "transcribe", str(speech), "-o", str(folder), "-f", "txt"],
    }


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        todo = commands(Path(folder))
        for command in todo.values():
            seconds(command)  # the first run fills the disk cache
        rounds = [{name: seconds(command) for name, command in todo.items()} for _ in range(ROUNDS)]
    torch_alone = [r["import torch"] for r in rounds]
    result = {"machine": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
              "rounds": ROUNDS, "median_seconds": {}, "median_ratio_to_import_torch": {}}  # fmt: skip
    for name in todo:
        own = [r[name] for r in rounds]
        result["median_seconds"][name] = round(statistics.median(own), 3)
        ratio = statistics.median(a / b for a, b in zip(own, torch_alone, strict=True))
        result["median_ratio_to_import_torch"][name] = round(ratio, 3)
        print(f"{name:<22} {statistics.median(own):7.3f} s  {ratio:6.2f} × import torch")
    (HERE / "startup.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
