"""Batches by step: whole items with their own labels, whatever is broken, how many workers and processes there are."""

import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data._utils import signal_handling

from multimodal.data.loader import Loader, _end, generator, shuffled
from multimodal.data.sources import open_source
from multimodal.errors import DataError, TrainingError
from multimodal.tokens.image.reading import read_image
from tests.helpers.data import sets
from tests.helpers.processes.programs import alive, wait_for
from tests.helpers.spread import thin

VALUES, BROKEN = range(10, 70), (13, 20, 21, 44)
MAKERS = {
    "folder": lambda place: sets.folder(place / "images", VALUES, BROKEN),
    "tar": lambda place: sets.shard(place / "a.tar", VALUES, BROKEN),
    "csv": lambda place: sets.table(place / "list.csv", VALUES, BROKEN),
}


@dataclass
class Batch:
    values: list[int]
    labels: list[str]
    drawn: list[int]
    padding: float


def prepare(sample, generator: torch.Generator) -> tuple[int, str, int]:
    value = read_image(sample.media).getpixel((0, 0))[0]
    return value, sample.label or sample.texts[0], int(torch.randint(1 << 30, (), generator=generator))


def collate(items: list[tuple[int, str, int]]) -> Batch:
    values, labels, drawn = (list(column) for column in zip(*items, strict=True))
    return Batch(values, labels, drawn, len(items) / 10)


class Numbers:
    """Items 0 to `count`; those in `broken` cannot be read."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()):
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def name(self, key: int) -> str:
        return f"item {key}"

    def read(self, key: int) -> int:
        if key in self.broken:
            raise DataError(f"item {key}: damaged (test)")
        return key


def take(loader: Loader, count: int, start: int = 0) -> list:
    steps = loader.start(start)
    found = [next(steps)._replace(waited=0.0) for _ in range(count)]
    steps.close()
    return found


def same(item: object, generator: torch.Generator) -> object:
    return item


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("layout", MAKERS)
def test_broken_items_are_named_counted_and_shift_no_label(layout, tmp_path, caplog):
    source = open_source(MAKERS[layout](tmp_path))
    runs = []
    for workers in (0, 2):
        caplog.clear()
        loader = Loader(source, shuffled(60, 12, 1), prepare, collate, workers=workers, micro=2, most_broken=0.1)
        runs.append(take(loader, 10))
        assert (loader.read, loader.broken) == (120, 8)
        assert sum(step.count for step in runs[-1]) == 112
        for value in BROKEN:
            logged = [r.message for r in caplog.records if f"{value:03}.png" in r.message]
            assert len(logged) == 2  # two epochs
            assert logged[0].startswith("broken item skipped: ")
            assert logged[0].count(f"{value:03}.png") == 1
    assert runs[0] == runs[1]
    for epoch in (runs[0][:5], runs[0][5:]):
        batches = [batch for step in epoch for batch in step.batches]
        assert sorted(v for b in batches for v in b.values) == sorted(set(VALUES) - set(BROKEN))
        assert all(b.labels == [sets.label(value) for value in b.values] for b in batches)
    assert {step.epoch for step in runs[0][5:]} == {1}


def test_too_many_broken_items_stop_the_run(tmp_path):
    plan = shuffled(40, 4, 0)
    with pytest.raises(DataError, match=r"1\d of \d+ items are broken, more than 5.0%; the last: item \d+: damaged"):
        take(Loader(Numbers(40, tuple(range(20))), plan, same, list, workers=2), 20)
    loader = Loader(Numbers(40, (3,)), plan, same, list)
    loader.read, loader.broken = 1000, 40  # of an earlier part of the run
    take(loader, 10)
    assert (loader.read, loader.broken) == (1040, 41)
    with pytest.raises(DataError, match=r"1 of \d+ items"):
        take(Loader(Numbers(40, (3,)), plan, same, list, most_broken=0), 10)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("workers", [0, 2])
def test_steps_from_any_start_are_those_of_an_unbroken_run(workers):
    def loader() -> Loader:
        return Loader(Numbers(50, (7, 8)), shuffled(50, 8, 3), drawn, list, workers=workers, micro=2, most_broken=1)

    whole = take(loader(), 20)
    for start in (1, 5, 6, 13):  # within an epoch, its last step and its end
        assert take(loader(), 20 - start, start) == whole[start:]


def drawn(item: int, generator: torch.Generator) -> tuple[int, float]:
    return item, float(torch.rand((), generator=generator))


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4)])
def test_processes_cover_each_global_batch_exactly_once(world, micro):
    plan = shuffled(64, 16, 0)
    ranks = [
        take(Loader(Numbers(64), plan, same, list, micro=micro, rank=rank, world=world), 6) for rank in range(world)
    ]
    for number, steps in enumerate(zip(*ranks, strict=True)):
        items = sorted(item for step in steps for batch in step.batches for item in batch)
        assert items == sorted(plan(number // 4)[number % 4])
        assert all(len(step.batches) == micro for step in steps)


def test_no_process_is_left_without_a_batch():
    batches = [[0, 1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11, 12]]

    def loader(rank: int, broken: tuple[int, ...], workers: int = 0) -> Loader:
        return Loader(Numbers(13, broken), lambda epoch: batches, same, list, workers=workers, rank=rank, world=2,
                      most_broken=1)  # fmt: skip

    steps = take(loader(1, (1, 3, 6)), 4)
    # 1 and 3 are broken, and so 4 of the next batch is read; that batch has nothing for this process
    assert [step.batches for step in steps] == [[[4]], [[8]], [[8]], [[10, 12]]]
    assert [step.broken for step in steps] == [2, 1, 1, 0]
    assert steps == take(loader(1, (1, 3, 6), workers=2), 4)
    assert steps[2:] == take(loader(1, (1, 3, 6)), 2, start=2)
    with pytest.raises(DataError, match=r"all \d+ items are broken, the last: item \d+: damaged"):
        take(loader(0, tuple(range(13))), 1)


def test_small_batches_of_one_process_make_fewer_micro_batches():
    loader = Loader(Numbers(5), lambda epoch: [[0, 1, 2], [3, 4], []], same, list, micro=4)
    assert [step.batches for step in take(loader, 3)] == [[[0], [1], [2]], [[3], [4]], [[0], [1], [2]]]


def test_the_plan_may_not_be_empty():
    with pytest.raises(DataError, match=r"epoch 0 has no batches \(0 planned\)"):
        take(Loader(Numbers(5), lambda epoch: [], same, list), 1)
    with pytest.raises(DataError, match="5 items are fewer than one batch of 6"):
        shuffled(5, 6, 0)


def test_more_workers_than_cores_are_no_warning(monkeypatch, caplog):
    """DataLoader's warning is an error in this suite."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    caplog.set_level("INFO")
    assert len(take(Loader(Numbers(8), shuffled(8, 2, 0), same, list, workers=2), 4)) == 4
    assert caplog.messages == ["2 workers share 1 CPU cores"]


def test_padding_of_the_batches_is_passed_on(tmp_path):
    source = open_source(sets.folder(tmp_path, VALUES))
    (step,) = take(Loader(source, shuffled(60, 9, 0), prepare, collate, micro=2), 1)
    assert step.padding == pytest.approx((0.5 + 0.4) / 2)
    (step,) = take(Loader(Numbers(9), shuffled(9, 9, 0), same, list), 1)
    assert step.padding is None


def test_nothing_global_is_seeded_or_drawn_from():
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # beartype draws from Python's own
    for workers in (0, 2):
        take(Loader(Numbers(8), shuffled(8, 2, 0), drawn, list, workers=workers), 3)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


class BugError(Exception):
    def __init__(self, first: str, second: str):  # cannot be made again from its text, as torch would
        super().__init__(f"{first}\n{second}")


def test_draws_depend_on_the_values_of_a_key_not_on_its_class():
    first, second = (namedtuple(name, "number text")(3, "a") for name in ("First", "Second"))
    draws = [torch.rand(3, generator=generator(0, (key, key))) for key in (first, second, (3, "a"), (4, "a"))]
    assert draws[0].equal(draws[1])
    assert draws[0].equal(draws[2])
    assert not draws[0].equal(draws[3])


def faulty(item: int, generator: torch.Generator) -> int:
    if item == 5:
        raise BugError("one", "two")
    return item


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_of_the_code_is_one_typed_error_with_its_place(workers):
    loader = Loader(Numbers(8), lambda epoch: [[0, 1], [4, 5]], faulty, list,
                    workers=workers)  # fmt: skip
    steps = loader.start(0)
    assert next(steps).batches == [[0, 1]]
    with pytest.raises(DataError) as caught:
        next(steps)
    assert str(caught.value) == "item 5: cannot be prepared (BugError: one two)"
    assert "in faulty" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_a_killed_worker_is_a_training_error():
    steps = Loader(Numbers(80), shuffled(80, 2, 0), same, list, workers=1).start(0)
    next(steps)
    worker = multiprocessing.active_children()[0].pid
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: not alive(worker))  # it dies here, which disturbs nothing that this process does
    with pytest.raises(TrainingError, match="a data worker has died"):
        list(itertools.islice(steps, 40))
    assert not multiprocessing.active_children()


def test_workers_end_with_the_iterator_and_outlive_a_signal_to_the_group():
    steps = Loader(Numbers(80), shuffled(80, 2, 0), same, list, workers=2).start(0)
    next(steps), next(steps)  # one of each worker, which now has its signal handlers
    workers = set(multiprocessing.active_children())
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(worker.pid, number)
    for _ in range(30):
        next(steps)
    assert set(multiprocessing.active_children()) == workers
    steps.close()
    assert not multiprocessing.active_children()


def test_a_worker_outlives_a_signal_from_its_first_moment(monkeypatch):
    begin = signal_handling._set_worker_signal_handlers

    def signalled():
        begin()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", signalled)
    before = signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    loader = Loader(Numbers(8), shuffled(8, 2, 0), same, list, workers=2)
    assert len(take(loader, 4)) == 4
    assert (signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


def heavy(item: int, generator: torch.Generator) -> int:
    """Products that torch would share out among threads, which a forked process must not wait for."""
    assert torch.get_num_threads() == 1
    x = torch.rand(300, 300, generator=generator)
    return int((x @ x).sum() > 0)


def test_workers_compute_after_the_parent_has_used_its_threads():
    torch.rand(700, 700) @ torch.rand(700, 700)
    loader = Loader(Numbers(8), shuffled(8, 2, 0), heavy, list, workers=2)
    assert [step.batches for step in take(loader, 4)] == [[[1, 1]]] * 4
    assert logging.getLogger("multimodal.data.loader").level == logging.NOTSET


def test_workers_end_after_the_thread_that_reads_from_them_for_a_gpu():
    """Else that thread writes a traceback about a connection."""
    done, results, alive = threading.Event(), multiprocessing.Queue(), []

    def read() -> None:  # as `torch.utils.data._utils.pin_memory`
        while not done.is_set():
            results.get(timeout=30)

    thread = threading.Thread(target=read)
    thread.start()
    worker = SimpleNamespace(kill=lambda: alive.append(thread.is_alive()), join=lambda: None)
    _end(SimpleNamespace(
        _pin_memory=True, _pin_memory_thread_done_event=done, _pin_memory_thread=thread, _worker_result_queue=results,
        _workers=[worker], _index_queues=[], _worker_pids_set=False,
    ))  # fmt: skip
    assert alive == [False]
