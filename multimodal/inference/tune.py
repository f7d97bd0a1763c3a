"""The quickest exact way to multiply by a weight on this processor, measured once.

Exact: a row has the same bits alone and in a batch. What is quick on one processor is slow on another (MKL is quick on
Intel's and slow on AMD's), so models measure while they are prepared and never while they serve. The choices lie in
`tune.json` of the user's cache folder, by processor, PyTorch and number of threads; MULTIMODAL_TUNE=0 takes the
built-in ones."""

import json
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from multimodal.errors import MultimodalError
from multimodal.system.compiled import processor
from multimodal.system.config import is_on
from multimodal.system.files import cache_folder, read_json, write_whole

Way = Callable[[Tensor], Callable[[Tensor], Tensor]]  # weight [N K] → rows [B K] → [B N]
SECONDS = 0.3  # of measuring in a process, after which maps get the built-in way
WEIGHTS = 1 << 21  # measured, so that they come from memory as in a model
ROWS = (1, 1, 8)  # measured: a token of one text, which is most of the work, and of several
BESIDE = (2, 3, 5, 8, 17, 64, 256, 1000)  # rows in whose company a row must keep its bits
PROBED = 400  # outputs of a map whose bits are compared
ROUNDS = 5
ALONE = ", on one thread"  # of a question: how it was measured
GAIN = 1.05  # by which a way must beat the built-in one, so that noise does not change bits

Choices = dict[str, str]  # shapes, or another question → way
_known: dict[str, Choices] = {}  # by machine
_spent = 0.0


def choose(outputs: int, inputs: int, ways: Mapping[str, Way], usual: str, rows: Sequence[int] = ROWS) -> str:
    """The name of the quickest of the exact `ways` for such maps of so many `rows`; `usual` if measuring is off or has
    taken too long. Maps of as many inputs and about as many weights share a choice."""
    size = min(outputs * inputs, 2 * WEIGHTS).bit_length() // 2
    measure = lambda: _measured(min(outputs, max(WEIGHTS // inputs, 64)), inputs, ways, usual, rows)
    many = "" if rows == ROWS else f", rows {' '.join(map(str, rows))}{ALONE}"
    return remembered(f"{inputs} inputs, about 4^{size} weights{many}", ways, usual, measure)


def quickest(question: str, works: Mapping[str, Callable[[], Callable[[], object]]], usual: str) -> str:
    """The name of the quickest of what `works` make, measured once; `usual` where that is about as quick, or measuring
    is off or has taken too long."""

    def measure() -> str:
        with _one_thread():
            return _best(least_times({name: make() for name, make in works.items()}), usual)

    return remembered(question + ALONE, works, usual, measure)


def remembered(question: str, answers: Container[str], usual: str, measure: Callable[[], str]) -> str:
    """The answer of `measure` on this machine, kept for the next time; `usual` if measuring is off or has taken too
    long."""
    global _spent
    if not is_on("MULTIMODAL_TUNE"):
        return usual
    name = machine()
    if name not in _known:
        _known[name] = _stored().get(name, {})
    if _known[name].get(question) not in answers:
        if _spent > SECONDS:
            return usual
        start = _clock()
        answer = measure()
        # what another process has chosen meanwhile counts, so that both have the same bits
        others = _stored()
        _known[name] |= others.get(name, {})
        if _known[name].get(question) not in answers:
            _known[name][question] = answer
        _store(others | {name: _known[name]})
        _spent += _clock() - start
    return _known[name][question]


def machine() -> str:
    return f"{processor()}, threads {torch.get_num_threads()}"


@cache
def is_intel() -> bool:
    """Return True on an Intel processor with AVX-512 whose PyTorch multiplies with MKL."""
    has = torch.cpu.get_capabilities()
    return "Intel" in str(has.get("cpu_name")) and bool(has.get("avx512_f")) and torch.backends.mkl.is_available()


@cache
def compiled_by_default() -> bool:
    """Return True where compiled maps and attention are the built-in ways: with AVX2, but on Intel's processors with
    AVX-512 they are not measured."""
    return bool(torch.cpu.get_capabilities().get("avx2")) and not is_intel()


def _path() -> Path:
    return cache_folder() / "tune.json"


def _stored() -> dict[str, Choices]:
    """The choices on all machines; none from a file that is missing or damaged."""
    with suppress(MultimodalError):
        tables = {name: table for name, table in read_json(_path()).items() if isinstance(table, dict)}
        return {name: {shapes: way for shapes, way in table.items() if isinstance(way, str)}
                for name, table in tables.items()}  # fmt: skip
    return {}


def _store(tables: dict[str, Choices]) -> None:
    with suppress(OSError, MultimodalError):  # a folder that cannot be written, no home
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_path(), (json.dumps(tables, indent=1) + "\n").encode())


def _clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Measure many rows so: whatever runs beside would decide between ways that several threads share. The trap: a
    thread of the caller that first uses PyTorch meanwhile keeps one, too."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def least_times(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each in its quickest of some rounds, in turn."""
    taken = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            start = _clock()
            work()
            taken[name] = min(taken[name], _clock() - start)
    return taken


def _best(costs: Mapping[str, float], usual: str) -> str:
    best = min(costs, key=costs.__getitem__, default=usual)
    return usual if usual in costs and costs[usual] < GAIN * costs[best] else best


@torch.no_grad()
def _measured(outputs: int, inputs: int, ways: Mapping[str, Way], usual: str, rows: Sequence[int]) -> str:
    draw = torch.Generator().manual_seed(0)
    weight, given = (torch.randn(size, inputs, generator=draw) for size in (min(outputs, PROBED), max(BESIDE)))
    exact = {name: way for name, way in ways.items() if _is_exact(way, weight, given)}
    weight = weight.repeat(-(-outputs // len(weight)), 1)[:outputs]
    copies = max(1, WEIGHTS // weight.numel())
    maps = {name: [way(weight) for _ in range(copies)] for name, way in exact.items()}
    with nullcontext() if rows == ROWS else _one_thread():
        taken = {count: least_times(_each(maps, given[:count].clone())) for count in set(rows)}
    return _best({name: sum(taken[count][name] for count in rows) for name in maps}, usual)


def _each(maps: Mapping[str, Sequence[Callable[[Tensor], Tensor]]], x: Tensor) -> dict[str, Callable[[], object]]:
    return {name: lambda copies=copies: [product(x) for product in copies] for name, copies in maps.items()}


def _is_exact(way: Way, weight: Tensor, rows: Tensor) -> bool:
    """A way that this processor lacks is none."""
    try:
        product = way(weight)
        every = product(rows)
        few = all(torch.equal(product(rows[:count].clone()), every[:count]) for count in BESIDE)
        return few and torch.equal(torch.cat([product(row[None].clone()) for row in rows[:8]]), every[:8])
    except (RuntimeError, NotImplementedError):
        return False
