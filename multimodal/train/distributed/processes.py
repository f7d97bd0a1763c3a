"""The processes of a run, as torchrun starts them; a program started without it is one process.

Gradients use nccl on GPUs and gloo on CPUs. Signals and errors, which the processes agree on between steps, always use
gloo on CPUs: it allows long waits and notices a dead process at once.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.errors import TrainingError, one_line
from multimodal.system.locks import lock, unlock
from multimodal.train.losses import SingleProcess
from multimodal.train.signals import Stopped

Result = TypeVar("Result")
LONG = timedelta(days=7)  # the others wait while the first process evaluates
LOST = ("connection closed", "connection reset", "broken pipe", "socket", "remote process exited")  # gloo's and nccl's


class Processes(SingleProcess):
    """Joins the process group of torchrun's environment (RANK, WORLD_SIZE, LOCAL_RANK). `device`: `cpu`, `cuda`."""

    def __init__(self, device: str = "cpu"):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        self.group = self.control = None
        if "RANK" not in os.environ:
            return
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.group = dist.group.WORLD
        self.control = dist.new_group(backend="gloo", timeout=LONG)

    @property
    def main(self) -> bool:
        """True for the process that prints, evaluates and saves."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the group once all processes have called this."""
        if self.group is not None and dist.is_initialized():
            self.tell("")
            dist.destroy_process_group()

    def total(self, value: Tensor) -> Tensor:
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def counts(self, count: int) -> list[int]:
        """Gather one number from each process."""
        if self.world == 1:
            return [count]
        gathered = torch.empty(self.world, dtype=torch.long)
        dist.all_gather_into_tensor(gathered, torch.tensor([count]), group=self.control)
        return gathered.tolist()

    def gather(self, value: Tensor, counts: Sequence[int]) -> Tensor:
        """Gather the rows of all processes, `counts` of each."""
        padded = value.new_zeros(max(1, *counts), *value.shape[1:])
        padded[: len(value)] = value
        rows = value.new_empty(self.world * len(padded), *value.shape[1:])
        dist.all_gather_into_tensor(rows, padded)
        return torch.cat([part[:count] for part, count in zip(rows.split(len(padded)), counts, strict=True)])

    def scatter(self, value: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
        """Return this process's rows of the `value` of each process."""
        own = [counts[self.rank]] * self.world
        rows = value.new_empty(sum(own), *value.shape[1:])
        dist.all_to_all_single(rows, value.contiguous(), own, list(counts))
        return rows.split(own)

    def agree(self, error: BaseException | None = None) -> None:
        """Exchange errors: all processes call this at the same point, with the error of this one, if any. Raises
        `error`; in the other processes Stopped for a Stopped, else TrainingError."""
        own = 0 if error is None else 1 if isinstance(error, Stopped) else 2
        kinds = self.counts(own)
        worst = max(kinds)
        if worst:
            first = kinds.index(worst)
            cause = self.tell(one_line(error), first)
            if own == worst:
                raise error
            raise Stopped(cause) if worst == 1 else TrainingError(f"process {first} ended: {cause}")

    @contextlib.contextmanager
    def together(self, run: Path) -> Iterator[None]:
        """Lock the folder of a run. Raises UsageError, in all processes, if another run is in it; TrainingError if
        another process was killed or has crashed."""
        try:
            with self._alone_in(run):
                yield
        except RuntimeError as error:
            text = one_line(error)
            if self.world == 1 or not any(sign in text.lower() for sign in LOST):
                raise
            raise TrainingError(f"process {self.rank}: another process has ended ({text[-120:]})") from error

    def tell(self, text: str, source: int = 0) -> str:
        """Broadcast a text from process `source`."""
        if self.world == 1:
            return text
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor([len(content)])
        dist.broadcast(length, source, group=self.control)
        content = content if self.rank == source else torch.empty(int(length), dtype=torch.uint8)
        if length:
            dist.broadcast(content, source, group=self.control)
        return bytes(content.tolist()).decode()

    def on_main(self, function: Callable[[], Result]) -> Result | None:
        """Run `function()` on the first process while the others wait. Its error is raised in all, as `agree` does."""
        result, error = None, None
        if self.main:
            try:
                result = function()
            except BaseException as cause:
                error = cause
        self.agree(error)
        return result

    @contextlib.contextmanager
    def _alone_in(self, run: Path) -> Iterator[None]:
        def entered() -> Any:
            with contextlib.suppress(OSError):  # the lock names the cause
                run.mkdir(parents=True, exist_ok=True)
            return lock(run, run / "run.lock", "run")

        held = self.on_main(entered)
        try:
            yield
        finally:
            unlock(held)

    def meeting(self) -> SingleProcess:
        """Return the exchange of texts between processes."""
        return SingleProcess() if self.world == 1 else Gather(self)


class Gather(SingleProcess):
    """All-gather of texts: two exchanges, with memory for the texts of all processes."""

    def __init__(self, processes: Processes):
        self.processes, self.total = processes, processes.total

    def sweep(self, work: Callable, merge: Callable, texts: Sequence[Tensor]) -> Sequence[Tensor]:
        counts = self.processes.counts(len(texts[0]))
        results = work(*(self.processes.gather(value, counts) for value in texts))
        parts = [self.processes.scatter(value, counts) for value in results]
        return functools.reduce(merge, zip(*parts, strict=True))
