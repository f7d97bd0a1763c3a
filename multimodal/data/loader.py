"""Batches as a pure function of the step: the same for any number of workers and processes, from any step on.

No order, queue or random state needs saving: `Loader.start(step)` yields what an uninterrupted run would get. An item's
random draws depend on (seed, epoch, item) alone, a batch's items on (seed, epoch) alone. Each of W processes takes
every W-th item of a global batch, each of k micro-batches every k-th of those.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data._utils import signal_handling

from multimodal.errors import DataError, MultimodalError, TrainingError
from multimodal.system.processes import end_with_parent
from multimodal.system.signals import SIGNALS

log = logging.getLogger(__name__)

Key = Hashable  # an index, or a tuple of indices read together
Plan = Callable[[int], Sequence[Sequence[Key]]]  # epoch → its global batches
BROKEN = (MultimodalError, OSError, ValueError, EOFError, SyntaxError, KeyError)  # raised by damaged items
POLL = 0.2  # seconds
SPARE = 32  # items tried for a micro-batch whose own items are all broken


@runtime_checkable
class Source(Protocol):
    """Items by key. `read` may raise one of `BROKEN`; `name` is the item's location for messages."""

    def __len__(self) -> int: ...

    def name(self, key: Key) -> str: ...

    def read(self, key: Key) -> Any: ...


def shuffled(count: int, batch: int, seed: int) -> Plan:
    """Shuffle all items each epoch, dropping the last incomplete batch."""
    if count < batch:
        raise DataError(f"{count} items are fewer than one batch of {batch}")

    def plan(epoch: int) -> list[list[int]]:
        order = torch.randperm(count, generator=generator(seed, epoch)).tolist()
        return [order[i : i + batch] for i in range(0, count - batch + 1, batch)]

    return plan


def generator(*parts: Key) -> torch.Generator:
    """Return a generator seeded by `parts` (numbers, strings, tuples of them) alone."""
    digest = hashlib.blake2b(repr(_plain(parts)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _plain(key: Any) -> Any:
    """Named tuples as tuples: the name of a class must not change what is drawn."""
    return tuple(map(_plain, key)) if isinstance(key, tuple) else key


def unchanged(item: Any, random: torch.Generator) -> Any:
    """A `prepare` for items that are ready."""
    return item


class Deferred(NamedTuple):
    """A batch whose last work is left to the device: `finish(*tensors)` makes it there. Images of 8 bits travel in a
    quarter of the time of floats, and a GPU augments them faster than all workers. Workers pickle `finish`."""

    finish: Callable[..., Any]
    tensors: tuple[Any, ...]

    @property
    def padding(self) -> float | None:
        return next((own for part in self.tensors if (own := getattr(part, "padding", None)) is not None), None)


def finished(batch: Any) -> Any:
    """Return the batch itself, made where its tensors are."""
    return batch.finish(*batch.tensors) if isinstance(batch, Deferred) else batch


class Step(NamedTuple):
    """The micro-batches of one process in one step. `padding`: mean of the batches' attribute `padding`, if they have
    one. `waited`: seconds until the batches arrived."""

    epoch: int
    batches: list[Any]
    count: int  # good items of this process
    broken: int
    padding: float | None = None
    waited: float = 0.0


class _LoaderJob(NamedTuple):
    epoch: int
    keys: list[Key]
    spare: list[tuple[int, Key]]  # epoch and key


class _Micro(NamedTuple):
    """One micro-batch: `batch` is collated from its good items, None if none were planned."""

    epoch: int
    batch: Any
    count: int
    broken: list[tuple[str, str]]  # name and cause


class _Failure(NamedTuple):
    """An error other than a damaged item, as text, since not every exception can be pickled by a worker."""

    line: str
    trace: str


class _Jobs(Dataset):
    """Dataset of micro-batches, read by the workers."""

    def __init__(self, source: Source, prepare: Callable, collate: Callable, seed: int, finish: bool):
        self.source, self.prepare, self.collate, self.seed, self.finish = source, prepare, collate, seed, finish

    def __getitem__(self, job: _LoaderJob) -> _Micro | _Failure:
        items: list[Any] = []
        broken: list[tuple[str, str]] = []
        at = "the batch"
        try:
            for epoch, key in itertools.chain(((job.epoch, key) for key in job.keys), job.spare):
                if len(broken) + len(items) >= len(job.keys) and items:
                    break
                at = self.source.name(key)
                self._read(epoch, key, at, items, broken)
            at = "the batch"
            if job.spare and not items:
                return _Failure(f"all {len(broken)} items are broken, the last: {': '.join(broken[-1])}", "")
            batch = self.collate(items) if items else None
            return _Micro(job.epoch, finished(batch) if self.finish else batch, len(items), broken)
        except Exception as error:
            return _Failure(f"{at}: cannot be prepared ({_cause(error)})", traceback.format_exc())

    def _read(self, epoch: int, key: Key, name: str, items: list[Any], broken: list[tuple[str, str]]) -> None:
        try:
            items.append(self.prepare(self.source.read(key), generator(self.seed, epoch, key)))
        except BROKEN as error:
            broken.append((name, _cause(error).removeprefix(f"{name}: ")))


def broken_item(name: str, error: Exception) -> str:
    """Return the name of a broken item and the cause, which may begin with the name too."""
    return f"{name}: {_cause(error).removeprefix(f'{name}: ')}"


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text and isinstance(error, MultimodalError) else f"{type(error).__name__}: {text}".rstrip(": ")


class Loader:
    """Loads steps of `micro` micro-batches. `prepare(item, generator)` decodes and augments one item, `collate(items)`
    makes a batch. Both run in `workers` processes (0: in this one) with one thread each, and so does the rest of a
    `Deferred` batch with `finish`.

    A broken item (one of `BROKEN`) is logged by name, counted and skipped. A micro-batch without a good item takes the
    next one of the batches that follow, so that no process lacks a batch while others wait for it; so does one without
    any item because the batch is smaller than the processes times `micro` (with one process it is dropped). Raises
    DataError for any other error, naming the item, with the worker's traceback as a note, and for a share of broken
    items over `most_broken` (of the items read, but at least of `patience`); TrainingError if a worker was killed."""

    patience = 200

    def __init__(
        self, source: Source, plan: Plan, prepare: Callable, collate: Callable, *, seed: int = 0, workers: int = 0,
        micro: int = 1, rank: int = 0, world: int = 1, most_broken: float | int = 0.05, finish: bool = True,
    ):  # fmt: skip
        self.plan, self.micro, self.rank, self.world, self.most_broken = plan, micro, rank, world, most_broken
        self.jobs, self.workers = _Jobs(source, prepare, collate, seed, finish), workers
        self.read = self.broken = 0  # totals, saved in the run's state
        self.epoch = ""  # counts of the first epoch, once it is planned; those of the state in a resumed run

    def _batches(self, step: int) -> Iterator[tuple[int, Sequence[Key]]]:
        """Yield (epoch, global batch) from number `step` on, without end."""
        for epoch in itertools.count():
            batches = [batch for batch in self.plan(epoch) if len(batch)]
            if not batches:
                raise DataError(f"epoch {epoch} has no batches (0 planned)")
            if not epoch:
                self._compare(f"{len(self.jobs.source)} items in {len(batches)} batches")
            yield from ((epoch, batch) for batch in batches[step:])
            step = max(0, step - len(batches))

    def _compare(self, epoch: str) -> None:
        if self.epoch not in ("", epoch) and not self.rank:
            problem = "continues at its step of other batches, so that items may repeat or be left out"
            log.warning("an epoch had %s before, now %s: the run %s", self.epoch, epoch, problem)
        self.epoch = epoch

    def _orders(self, step: int) -> Iterator[_LoaderJob]:
        parts = self.world * self.micro
        ahead: list[tuple[int, Sequence[Key]]] = []
        following = self._batches(step)
        while True:
            while sum(-(-len(batch) // parts) for _, batch in ahead[1:]) < SPARE:
                ahead.append(next(following))
            epoch, batch = ahead.pop(0)
            for slot in range(self.rank, parts, self.world):
                keys = list(batch[slot::parts])
                yield _LoaderJob(epoch, keys, _spare(ahead, slot, parts) if keys or self.world > 1 else [])

    def start(self, step: int, check: Callable[[], None] = lambda: None) -> Iterator[Step]:
        """Yield steps from number `step` on, without end. Closing the iterator ends the workers. `check` is called for
        each micro-batch, and every `POLL` seconds while waiting for one; what it raises ends the iterator."""
        signal_handling._SIGCHLD_handler_set = True  # keeps torch's handler off, which raises anywhere in the program
        with blocked(), warnings.catch_warnings():
            # workers that wait for a disk or a network may outnumber the cores
            warnings.filterwarnings("ignore", "This DataLoader will create")
            micros = iter(self._micro_batches(step))
        try:
            while True:
                began = time.perf_counter()
                group = [self._next(micros, check) for _ in range(self.micro)]
                waited = time.perf_counter() - began
                count, broken = sum(m.count for m in group), [fault for m in group for fault in m.broken]
                self._count(count, broken)
                batches = [m.batch for m in group if m.batch is not None]
                yield Step(group[0].epoch, batches, count, len(broken), _padding(batches), waited)
        finally:
            if self.workers:
                _end(micros)  # otherwise they live as long as a traceback refers to them

    def _micro_batches(self, step: int) -> DataLoader:
        spawn: dict[str, Any] = {}
        if self.workers:
            spawn = {"prefetch_factor": 2 * self.micro, "worker_init_fn": calm_worker, "timeout": POLL}
        if self.workers > (cores := len(os.sched_getaffinity(0))):
            log.info("%d workers share %d CPU cores", self.workers, cores)
        return DataLoader(
            self.jobs, sampler=_Order(lambda: self._orders(step)), batch_size=None, num_workers=self.workers,
            collate_fn=_same, generator=torch.Generator(),  # by default it would draw from the global one
            pin_memory=bool(self.workers) and torch.cuda.is_initialized(), **spawn,
        )  # fmt: skip

    def _next(self, micros: Any, check: Callable[[], None]) -> _Micro:
        micro = None
        while micro is None:
            check()
            try:
                micro = next(micros)
            except RuntimeError as error:
                self._waited(micros, error, check)
        if isinstance(micro, _Failure):
            failure = DataError(micro.line)
            if micro.trace:
                failure.add_note(micro.trace)
            raise failure
        return micro

    def _waited(self, micros: Any, error: RuntimeError, check: Callable[[], None]) -> None:
        """Return if `error` only means that `POLL` seconds have passed."""
        if str(error).startswith("DataLoader timed out"):
            if micros._pin_memory and not micros._pin_memory_thread.is_alive():
                raise TrainingError("the thread that pins batches in memory has ended") from None
        elif str(error).startswith("DataLoader worker"):
            check()  # stopping a run may kill its workers too
            raise TrainingError(f"a data worker has died, perhaps out of memory ({_cause(error)})") from None
        else:
            raise error

    def _count(self, good: int, broken: list[tuple[str, str]]) -> None:
        for name, cause in broken:
            log.warning("broken item skipped: %s: %s", name, cause)
        self.read, self.broken = self.read + good + len(broken), self.broken + len(broken)
        if broken and self.broken > self.most_broken * max(self.read, self.patience):
            raise DataError(
                f"{self.broken} of {self.read} items are broken, more than {self.most_broken:.1%}; the last: "
                + ": ".join(broken[-1])
            )


def _end(micros: Any) -> None:
    """Kill the workers of a DataLoader's iterator, whose own shutdown waits seconds for each busy one."""
    micros._shutdown = True  # turns that shutdown off
    if micros._pin_memory:
        micros._pin_memory_thread_done_event.set()
        results = micros._worker_result_queue
        results.put((None, None))  # wakes the thread
        micros._pin_memory_thread.join(5)  # seconds; a worker that ended while it reads from it would be an error there
        results.cancel_join_thread()
        results.close()
    for worker in micros._workers:
        worker.kill()
    for worker in micros._workers:
        worker.join()
    for orders in micros._index_queues:
        orders.cancel_join_thread()
        orders.close()
    if micros._worker_pids_set:
        torch._C._remove_worker_pids(id(micros))
        micros._worker_pids_set = False


def _spare(ahead: list[tuple[int, Sequence[Key]]], slot: int, parts: int) -> list[tuple[int, Key]]:
    """Return items of the following batches, different ones for each slot if there are enough."""
    spare = ((epoch, batch[i]) for epoch, batch in ahead for i in range(slot % len(batch), len(batch), parts))
    return list(itertools.islice(spare, SPARE))


def _padding(batches: list[Any]) -> float | None:
    shares = [float(batch.padding) for batch in batches if getattr(batch, "padding", None) is not None]
    return sum(shares) / len(shares) if shares else None


class _Order(Sampler):
    def __init__(self, make: Callable[[], Iterator]):
        self.make = make

    def __iter__(self) -> Iterator:
        return self.make()


def _same(micro: _Micro | _Failure) -> _Micro | _Failure:
    return micro


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block signals, also in a worker forked inside, until its `calm_worker`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def calm_worker(_: int = 0) -> None:
    """Make a worker ignore signals sent to all processes of a run, which still needs its batches and ends it with
    SIGKILL."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()


def calm_pool_worker() -> None:
    """As `calm_worker`, but SIGTERM ends it: an executor that is broken ends its workers so."""
    calm_worker()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
