"""Benchmark candidates for tests: they sleep and return a given answer."""

import os
import time
from pathlib import Path


def prepare(folder: Path, device: str) -> None:
    (folder / "input.txt").write_text("prepared")


def sleeper(folder: Path, device: str, seconds: float, answer: list[float]):
    assert (folder / "input.txt").read_text() == "prepared"

    def run():
        time.sleep(seconds)
        return answer

    return run


def absent(folder: Path, device: str):
    import no_such_library  # noqa: F401


def broken(folder: Path, device: str):
    raise ValueError("no weights here")


def dies(folder: Path, device: str):
    return lambda: os._exit(3)


def threads(folder: Path, device: str):
    return lambda: [int(os.environ["OMP_NUM_THREADS"]), len(os.sched_getaffinity(0))]


def interpreter(folder: Path, device: str):
    return lambda: [float(os.environ.get("WHICH", 1))]
