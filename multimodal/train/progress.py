"""A run seen while it runs: one progress line, `metrics.jsonl` and TensorBoard files, every few steps."""

import contextlib
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from multimodal.train.device import peak_flops

log = logging.getLogger(__name__)


def memory(device: str) -> int:
    """Most bytes held so far: by torch on a GPU, by the process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Watch:
    """Means over the last `every` steps of what is logged, written to `run`.

    `flops`: arithmetic of an item in forward and backward, for the share of the peak of `world` GPUs (MFU). A resumed
    run adds to the files; lines of steps that it does again replace the old ones."""

    def __init__(self, run: Path, total: int, every: int, done: int = 0, device: str = "cpu", world: int = 1):
        self.run, self.total, self.every, self.device, self.world = run, total, every, device, world
        self.flops: float | None = None
        self.first, self.began, self.since = done, time.monotonic(), time.monotonic()
        self.sums: dict[str, float] = {}
        self.steps, self.items, self.wait, self.skipped = 0, 0, 0.0, 0
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / "metrics.jsonl"
        self._forget(done)
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=done + 1)

    def _forget(self, done: int) -> None:
        """Drops lines past step `done`: they belong to steps that were lost."""
        if self.path.exists():
            kept = [line for line in self.path.read_text(encoding="utf-8").splitlines() if _step(line) <= done]
            part = self.path.with_name("metrics.jsonl.part")
            part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            part.replace(self.path)

    def step(
        self, number: int, metrics: Mapping[str, float], *, rate: float, items: int, wait: float,
        padding: float | None = None, broken: int = 0, skipped: int = 0,
    ) -> None:  # fmt: skip
        """After step `number`: `wait` seconds for its data; `broken` items and `skipped` steps so far in all."""
        row = dict(metrics) | ({} if padding is None else {"padding": padding})
        if not all(map(math.isfinite, metrics.values())):
            row = {}
        for name, value in row.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.steps, self.items, self.wait = self.steps + 1, self.items + items, self.wait + wait
        self.skipped += not row
        if number % self.every == 0 or number == self.total:
            self._write(number, rate, broken, skipped)

    def _write(self, number: int, rate: float, broken: int, skipped: int) -> None:
        seconds = max(time.monotonic() - self.since, 1e-9)
        counted = max(1, self.steps - self.skipped)
        row: dict[str, Any] = {"step": number} | {name: value / counted for name, value in self.sums.items()}
        row |= {"lr": rate, "samples_per_s": self.items / seconds, "wait_share": self.wait / seconds,
                "memory_bytes": memory(self.device), "broken": broken, "skipped": skipped}  # fmt: skip
        if self.flops and (peak := peak_flops()):
            row["mfu"] = self.flops * self.items / seconds / (peak * self.world)
        left = (time.monotonic() - self.began) / max(1, number - self.first) * (self.total - number)
        self.log(row)
        print(progress(row, self.total, left), file=sys.stderr, flush=True)
        self.since, self.sums = time.monotonic(), {}
        self.steps, self.items, self.wait, self.skipped = 0, 0, 0.0, 0

    def evaluated(self, number: int, figures: Mapping[str, float]) -> None:
        self.log({"step": number} | {f"eval/{name}": value for name, value in figures.items()})
        shown = " ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"step {number} evaluated: {shown}", file=sys.stderr, flush=True)
        self.since = time.monotonic()  # the time spent on it is no training time

    def log(self, row: dict[str, Any]) -> None:
        """A full disk costs the row, not the run."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            for name, value in row.items():
                if name != "step":
                    self.board.add_scalar(name, value, row["step"])
        except OSError as error:
            log.warning("%s: step %d is not logged: %s", self.path, row["step"], error.strerror or error)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written was said by `log`
            self.board.close()


def _step(line: str) -> int | float:
    """A line's step; a line cut by a kill belongs nowhere."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def progress(row: Mapping[str, Any], total: int, left: float) -> str:
    """The one line: `step 50/4200 loss 2.31 lr 3.0e-04 311 samples/s padding 4.1% wait 2% 3.4 GB eta 0:41:10`."""
    parts = [f"step {row['step']}/{total}"]
    parts += [f"{name} {row[name]:.4g}" for name in row if name == "loss" or name.endswith("loss")]
    parts += [f"lr {row['lr']:.2e}", f"{row['samples_per_s']:.3g} samples/s"]
    if "padding" in row:
        parts.append(f"padding {row['padding']:.1%}")
    parts += [f"wait {row['wait_share']:.0%}", f"{row['memory_bytes'] / 1e9:.1f} GB"]
    if "mfu" in row:
        parts.append(f"mfu {row['mfu']:.1%}")
    minutes, seconds = divmod(round(left), 60)
    parts.append(f"eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}")
    parts += [f"{name} {row[name]}" for name in ("broken", "skipped") if row[name]]
    return " ".join(parts)
