"""Training log: a progress line, metrics.jsonl and TensorBoard files."""

import contextlib
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multimodal.system.files import append_whole, say
from multimodal.train.flops import StepFlops, peak_flops

log = logging.getLogger(__name__)

EARLY = (1, 2, 5, 10)  # steps after the start that are printed too


def is_logged(step: int, first: int, every: int, total: int) -> bool:
    """Return True for every `every`-th step, the last one, and a few after `first`, where the run started."""
    return step % every == 0 or step == total or (step - first in EARLY and step - first < every)


def peak_memory(device: str) -> int:
    """Peak bytes allocated by torch on a GPU, or held by this process on a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class TrainingLog:
    """Logs means over the last `every` steps to `run`, and prints the first steps.

    `flops`: per element of the batches; with it the line shows the utilization of `world` GPUs. A resumed run appends
    to the files and replaces the lines of repeated steps; `evaluated`: the evaluation of step `first` is not repeated.
    """

    def __init__(
        self, run: Path, total: int, every: int, first: int = 0, device: str = "cpu", world: int = 1,
        evaluated: bool = True,
    ):  # fmt: skip
        self.run, self.total, self.every, self.device, self.world = run, total, every, device, world
        self.flops: StepFlops | None = None
        self.first, self.started, self.since = first, time.monotonic(), time.monotonic()
        self._reset()
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / "metrics.jsonl"
        self._drop_lines_after((first, evaluated))
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.board: SummaryWriter | None = None
        self.boards, self.purge = partial(SummaryWriter, str(run / "tensorboard")), first + 1

    def _reset(self) -> None:
        self.sums: dict[str, float] = {}
        self.steps, self.skipped, self.items, self.elements, self.wait = 0, 0, 0, 0, 0.0

    def _drop_lines_after(self, place: tuple[int, bool]) -> None:
        if self.path.exists():
            kept = [line for line in self.path.read_text("utf-8", "replace").splitlines() if _place(line) <= place]
            part = self.path.with_name("metrics.jsonl.part")
            part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            part.replace(self.path)

    def step(
        self, number: int, metrics: Mapping[str, float], *, rate: float, items: int, wait: float, elements: int = 0,
        padding: float | None = None, broken: int = 0, skipped: int = 0,
    ) -> None:  # fmt: skip
        """Add step `number`. `wait`: seconds spent waiting for data; `broken`: items, `skipped`: steps, both totals."""
        row = dict(metrics) | ({} if padding is None else {"padding": padding})
        if not all(map(math.isfinite, metrics.values())):
            row = {}
        for name, value in row.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.steps, self.items, self.wait = self.steps + 1, self.items + items, self.wait + wait
        self.skipped, self.elements = self.skipped + (not row), self.elements + elements
        if number % self.every == 0 or number == self.total:
            self._write(number, rate, broken, skipped)
        elif is_logged(number, self.first, self.every, self.total):  # printed alone: a resumed run's rows stay the same
            self._print(self._row(number, rate, broken, skipped))

    def _write(self, number: int, rate: float, broken: int, skipped: int) -> None:
        row = self._row(number, rate, broken, skipped)
        self.log(row)
        self._print(row)
        self.since = time.monotonic()
        self._reset()

    def _print(self, row: dict[str, Any]) -> None:
        done = row["step"] - self.first
        left = (time.monotonic() - self.started) / max(1, done) * (self.total - row["step"])
        say(progress(row, self.total, left))

    def _row(self, number: int, rate: float, broken: int, skipped: int) -> dict[str, Any]:
        seconds = max(time.monotonic() - self.since, 1e-9)
        counted = max(1, self.steps - self.skipped)
        row: dict[str, Any] = {"step": number} | {name: value / counted for name, value in self.sums.items()}
        row |= {"lr": rate, "samples_per_s": self.items / seconds, "wait_share": self.wait / seconds,
                "memory_bytes": peak_memory(self.device), "broken": broken, "skipped": skipped}  # fmt: skip
        if self.flops and (peak := peak_flops()):
            share = self.elements / seconds / (peak * self.world)
            row |= {"mfu": self.flops.model * share, "hfu": self.flops.hardware * share}
        return row

    def evaluated(self, number: int, metrics: Mapping[str, float | None], seconds: float) -> None:
        metrics = {name: value for name, value in metrics.items() if value is not None}
        self.log({"step": number} | {f"eval/{name}": value for name, value in metrics.items()})
        shown = " ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        say(f"step {number} evaluated in {seconds:.1f} s: {shown}")

    @contextlib.contextmanager
    def paused(self, line: str) -> Iterator[None]:
        """Announce other work, whose time does not count in the training speed."""
        say(line)
        began = time.monotonic()
        yield
        self.since += time.monotonic() - began

    def log(self, row: dict[str, Any]) -> None:
        """Write a row. A full disk loses the row, not the run."""
        try:
            append_whole(self.path, json.dumps(row).encode() + b"\n")
            self._show(row)
        except OSError as error:
            log.warning("%s: step %d is not logged: %s", self.path, row["step"], error.strerror or error)

    def _show(self, row: Mapping[str, Any]) -> None:
        """Add a row to TensorBoard's files. An error ends their writer; the next row opens another."""
        board, self.board = self.board or self.boards(purge_step=self.purge), None
        self.purge = row["step"]
        for name, value in row.items():
            if name != "step":
                board.add_scalar(name, value, row["step"])
        self.board = board

    def close(self) -> None:
        if self.board:
            with contextlib.suppress(OSError):  # `log` has warned already
                self.board.close()


def _place(line: str) -> tuple[int | float, bool]:
    """Return the step of a line and whether it is an evaluation; infinity for a line cut by a kill or otherwise
    damaged."""
    try:
        row = json.loads(line)
        step, evaluation = row["step"], any(name.startswith("eval/") for name in row)
    except (ValueError, LookupError, TypeError, RecursionError):
        return math.inf, False
    return step if isinstance(step, int) else math.inf, evaluation


def progress(row: Mapping[str, Any], total: int, left: float) -> str:
    """Format `step 50/4200 loss 2.31 lr 3.0e-04 311 samples/s padding 4.1% wait 2% 3.4 GB eta 0:41:10`."""
    parts = [f"step {row['step']}/{total}"]
    parts += [f"{name} {row[name]:.4g}" for name in row if name.endswith("loss")]
    parts += [f"lr {row['lr']:.2e}", f"{row['samples_per_s']:.3g} samples/s"]
    if "padding" in row:
        parts.append(f"padding {row['padding']:.1%}")
    parts += [f"wait {row['wait_share']:.0%}", f"{row['memory_bytes'] / 1e9:.1f} GB"]
    parts += [f"{name} {row[name]:.1%}" for name in ("mfu", "hfu") if name in row]
    minutes, seconds = divmod(round(left), 60)
    parts.append(f"eta {minutes // 60}:{minutes % 60:02d}:{seconds:02d}")
    parts += [f"{name} {row[name]}" for name in ("broken", "skipped") if row[name]]
    return " ".join(parts)
