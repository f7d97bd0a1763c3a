"""Several processes of one run, as torchrun starts them; a program that is started plainly is one process.

Gradients travel over nccl on GPUs and gloo on CPUs. What the processes agree on between steps (signals and errors)
travels over gloo on CPUs always, where waiting long is no fault and a process that died is noticed at once.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from multimodal.errors import TrainingError
from multimodal.train.losses import Alone
from multimodal.train.signals import Stopped

Result = TypeVar("Result")
LONG = timedelta(days=7)  # an evaluation on the first process may take any time
LOST = ("connection closed", "connection reset", "broken pipe", "socket", "remote process exited")  # gloo's and nccl's


class Processes(Alone):
    """Joins the group that torchrun's environment describes (RANK, WORLD_SIZE, LOCAL_RANK). `device`: `cpu`, `cuda`."""

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
        """Whether this process prints, evaluates and saves."""
        return self.rank == 0

    def close(self) -> None:
        """Leaves the group, when all processes have come here."""
        if self.group is not None and dist.is_initialized():
            self.tell("")
            dist.destroy_process_group()

    def total(self, value: Tensor) -> Tensor:
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def counts(self, count: int) -> list[int]:
        """The number that each process gives."""
        if self.world == 1:
            return [count]
        found = torch.empty(self.world, dtype=torch.long)
        dist.all_gather_into_tensor(found, torch.tensor([count]), group=self.control)
        return found.tolist()

    def gather(self, value: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes, of which each gives `counts` many."""
        padded = value.new_zeros(max(1, *counts), *value.shape[1:])
        padded[: len(value)] = value
        found = value.new_empty(self.world * len(padded), *value.shape[1:])
        dist.all_gather_into_tensor(found, padded)
        return torch.cat([part[:count] for part, count in zip(found.split(len(padded)), counts, strict=True)])

    def scatter(self, value: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
        """Each process is given its rows of the `value` of all processes."""
        own = [counts[self.rank]] * self.world
        found = value.new_empty(sum(own), *value.shape[1:])
        dist.all_to_all_single(found, value.contiguous(), own, list(counts))
        return found.split(own)

    def pass_on(self, values: Sequence[Tensor], count: int) -> list[Tensor]:
        """Gives `values` to the next process and takes those of the one before, which have `count` rows."""
        found = [value.new_empty(count, *value.shape[1:]) for value in values]
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        moves = [dist.P2POp(dist.isend, value.contiguous(), after, tag=i) for i, value in enumerate(values)]
        moves += [dist.P2POp(dist.irecv, value, before, tag=i) for i, value in enumerate(found)]
        for move in dist.batch_isend_irecv(moves):
            move.wait()
        return found

    def agree(self, error: BaseException | None = None) -> None:
        """Called by all processes at the same place, with what went wrong in this one. Raises `error`; in the other
        processes Stopped for a Stopped, else TrainingError."""
        own = 0 if error is None else 1 if isinstance(error, Stopped) else 2
        kinds = self.counts(own)
        worst = max(kinds)
        if worst:
            first = kinds.index(worst)
            cause = self.tell(" ".join(str(error).split()) or type(error).__name__, first)
            if own == worst:
                raise error
            raise Stopped(cause) if worst == 1 else TrainingError(f"process {first} ended: {cause}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around all that processes do together: raises TrainingError where another one was killed or has crashed."""
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if self.world == 1 or not any(sign in text.lower() for sign in LOST):
                raise
            raise TrainingError(f"process {self.rank}: another process has ended ({text[-120:]})") from error

    def tell(self, text: str, source: int = 0) -> str:
        """The text that process `source` gives, for all."""
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
        """`function()` on the first process, for which the others wait. Raises what it raises, in the others as
        `agree` does."""
        result, error = None, None
        if self.main:
            try:
                result = function()
            except BaseException as found:
                error = found
        self.agree(error)
        return result

    def meeting(self, exchange: str) -> Alone:
        """How pictures meet the texts of all processes: `gather` or `ring`."""
        return Alone() if self.world == 1 else {"gather": Gather, "ring": Ring}[exchange](self)


class Gather(Alone):
    """Each process is shown the texts of all at once: two exchanges, and room for all texts."""

    def __init__(self, processes: Processes):
        self.processes, self.total = processes, processes.total

    def sweep(self, work: Callable, merge: Callable, texts: Sequence[Tensor]) -> Sequence[Tensor]:
        counts = self.processes.counts(len(texts[0]))
        found = work(*(self.processes.gather(value, counts) for value in texts))
        parts = [self.processes.scatter(value, counts) for value in found]
        return functools.reduce(merge, zip(*parts, strict=True))


class Ring(Alone):
    """The texts go round, with what was found for them: room for those of one process at a time."""

    def __init__(self, processes: Processes):
        self.processes, self.total = processes, processes.total

    def sweep(self, work: Callable, merge: Callable, texts: Sequence[Tensor]) -> Sequence[Tensor]:
        rank, world = self.processes.rank, self.processes.world
        counts, carried = self.processes.counts(len(texts[0])), []
        for hop in range(world):
            found = work(*texts)
            carried = merge(carried, found) if carried else found
            both = self.processes.pass_on([*texts, *carried], counts[(rank - hop - 1) % world])
            texts, carried = both[: len(texts)], both[len(texts) :]
        return carried
