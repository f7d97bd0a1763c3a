"""Batches as a pure function of the step: the same for any number of workers and processes, from any step on.

No order, queue or random state has to be saved: `Loader.start(step)` gives what an unbroken run would see there. What
is random about an item depends on (seed, epoch, item) alone, what a batch holds on (seed, epoch) alone. Each process
takes every W-th item of a global batch, each micro-batch every k-th of those.
"""

import hashlib
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from multimodal.errors import DataError, MultimodalError

log = logging.getLogger(__name__)

Key = Hashable  # an index, or a tuple of indices that are read together
Plan = Callable[[int], Sequence[Sequence[Key]]]  # epoch → the global batches of it
BROKEN = (MultimodalError, OSError, ValueError, EOFError, SyntaxError, KeyError)  # what a damaged item may raise


class Source(Protocol):
    """Items by key. `read` may raise one of `BROKEN` for a damaged one; `name` says where the item lies."""

    def __len__(self) -> int: ...

    def name(self, key: Key) -> str: ...

    def read(self, key: Key) -> Any: ...


def shuffled(count: int, batch: int, seed: int) -> Plan:
    """Every item once an epoch in random order; what is left over by whole batches waits for another epoch."""
    if count < batch:
        raise DataError(f"{count} items are fewer than one batch of {batch}")

    def plan(epoch: int) -> list[list[int]]:
        order = torch.randperm(count, generator=generator(seed, epoch)).tolist()
        return [order[i : i + batch] for i in range(0, count - batch + 1, batch)]

    return plan


def generator(*parts: Key) -> torch.Generator:
    """A random generator that depends on `parts` (numbers, texts, tuples of them) alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class Micro(NamedTuple):
    """One micro-batch: `batch` is what `collate` made of its whole items, None where there is none."""

    batch: Any
    count: int
    broken: list[tuple[str, str]]  # name and cause


class Step(NamedTuple):
    epoch: int
    batches: list[Any]
    count: int  # whole items of this process
    broken: int


class _Jobs(Dataset):
    """Makes micro-batches; runs in the workers."""

    def __init__(self, source: Source, prepare: Callable, collate: Callable, seed: int):
        self.source, self.prepare, self.collate, self.seed = source, prepare, collate, seed

    def __getitem__(self, job: tuple[int, list[Key]]) -> Micro:
        epoch, keys = job
        items, broken = [], []
        for key in keys:
            try:
                items.append(self.prepare(self.source.read(key), generator(self.seed, epoch, key)))
            except BROKEN as error:
                broken.append((self.source.name(key), " ".join(str(error).split()) or type(error).__name__))
        return Micro(self.collate(items) if items else None, len(items), broken)


class Loader:
    """`prepare(item, generator)` decodes and augments one item; `collate(items)` makes the batch of them.

    A broken item is logged by name, counted and left out of its batch. Raises DataError when more than
    `most_broken` of the items read so far are broken (not before `patience` items)."""

    patience = 200

    def __init__(
        self, source: Source, plan: Plan, prepare: Callable, collate: Callable, *, seed: int = 0, workers: int = 0,
        micro: int = 1, rank: int = 0, world: int = 1, most_broken: float = 0.05,
    ):  # fmt: skip
        self.plan, self.micro, self.rank, self.world, self.most_broken = plan, micro, rank, world, most_broken
        self.jobs, self.workers = _Jobs(source, prepare, collate, seed), workers
        self.read = self.broken = 0  # in all, kept in the run's state

    def _orders(self, step: int) -> Iterator[tuple[int, list[Key]]]:
        epoch = 0
        while True:
            batches = self.plan(epoch)
            for batch in batches[step:]:
                own = list(batch)[self.rank :: self.world]
                yield from ((epoch, own[i :: self.micro]) for i in range(self.micro))
            step, epoch = max(0, step - len(batches)), epoch + 1

    def start(self, step: int) -> Iterator[Step]:
        """Endless steps, from number `step` on."""
        order = _Order(lambda: self._orders(step))
        spawn = {"prefetch_factor": 2 * self.micro, "persistent_workers": False} if self.workers else {}
        micros, epochs = DataLoader(
            self.jobs, sampler=order, batch_size=None, num_workers=self.workers, collate_fn=_same, **spawn
        ), self._orders(step)
        group: list[Micro] = []
        for micro, (epoch, _) in zip(micros, epochs, strict=False):
            group.append(micro)
            if len(group) == self.micro:
                broken = [fault for m in group for fault in m.broken]
                self._count(sum(m.count for m in group), broken)
                batches = [m.batch for m in group if m.batch is not None]
                yield Step(epoch, batches, sum(m.count for m in group), len(broken))
                group = []

    def _count(self, whole: int, broken: list[tuple[str, str]]) -> None:
        for name, cause in broken:
            log.warning("broken item skipped: %s: %s", name, cause)
        self.read, self.broken = self.read + whole + len(broken), self.broken + len(broken)
        if self.read >= self.patience and self.broken > self.most_broken * self.read:
            raise DataError(
                f"{self.broken} of {self.read} items are broken, more than {self.most_broken:.1%}; the last: "
                + ": ".join(broken[-1] if broken else ("", ""))
            )


class _Order(torch.utils.data.Sampler):
    def __init__(self, make: Callable[[], Iterator]):
        self.make = make

    def __iter__(self) -> Iterator:
        return self.make()


def _same(micro: Micro) -> Micro:
    return micro
