"""Mixtures of sources by weight (Brown et al. 2020, table 2.2) or by temperature (Fan et al. 2021, M2M100).

A row's source is drawn by weight from (seed, epoch) alone, and each source gives its rows in its own order, one of its
epochs after the other. So a run resumes at any step, and with any number of workers, to the same rows."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from multimodal.data.loader import Plan, Source, generator
from multimodal.errors import UsageError, demand

SINKHORN = 200  # scalings of rows and columns


class MixtureRow(NamedTuple):
    """`rows` per epoch of a source; `epochs` of it that a run takes, by expectation."""

    name: str
    rows: int
    weight: float
    epochs: float


def mixture_weights(values: Sequence[float], argument: str = "weights") -> list[float]:
    """Scale to a sum of 1. Raises UsageError for a value below 0 or not finite, and for a sum of 0."""
    demand(argument, list(values), all(0 <= value < float("inf") for value in values), "0 or more each")
    if not sum(values):
        raise UsageError(f"{list(values)}: sum to 0, so there is nothing to draw from", argument=argument)
    return [value / sum(values) for value in values]


def temperature_weights(sizes: Sequence[float], temperature: float) -> list[float]:
    """Weights in proportion to size^(1/T): 1 as the sizes are, towards infinity all alike."""
    return mixture_weights([size ** (1 / temperature) for size in sizes], "sizes")


class Mixture:
    """The loader's source of rows of several sources, each with a `plan(batch, seed)`; keys are (source, its key).

    `names`: of the sources, for messages and the table. Raises UsageError for weights as `mixture_weights`."""

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], names: Sequence[str]):
        if not len(sources) == len(weights) == len(names):
            raise UsageError(f"expected a weight for each of {len(sources)} sources (got {len(weights)})",
                             argument="weights")  # fmt: skip
        self.sources: list[Source] = list(sources)
        self.weights, self.names = mixture_weights(weights), list(names)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def name(self, key: tuple[int, Any]) -> str:
        return f"{self.names[key[0]]}: {self.sources[key[0]].name(key[1])}"

    def read(self, key: tuple[int, Any]) -> Any:
        return self.sources[key[0]].read(key[1])

    def plan(self, batch: int, seed: int) -> Plan:
        """Epochs with as many rows as all sources have together, in whole batches."""
        streams = [_Stream(source.plan(1, seed + 1 + number)) for number, source in enumerate(self.sources)]
        size = max(1, sum(stream.rows for stream in streams) // batch) * batch
        weights = torch.tensor(self.weights, dtype=torch.float64)
        before = [[0] * len(streams)]  # rows taken of each source by each epoch

        def drawn(epoch: int) -> torch.Tensor:
            return torch.multinomial(weights, size, replacement=True, generator=generator(seed, epoch))

        def plan(epoch: int) -> list[list[tuple[int, Any]]]:
            while len(before) <= epoch:
                counts = torch.bincount(drawn(len(before) - 1), minlength=len(streams)).tolist()
                before.append([a + b for a, b in zip(before[-1], counts, strict=True)])
            order = drawn(epoch)
            counts = torch.bincount(order, minlength=len(streams)).tolist()
            taken = [iter(stream.take(first, n)) for stream, first, n in zip(streams, before[epoch], counts,
                                                                             strict=True)]  # fmt: skip
            rows = [(number, next(taken[number])) for number in order.tolist()]
            return [rows[at : at + batch] for at in range(0, size, batch)]

        return plan

    def table(self, rows: int) -> list[MixtureRow]:
        """Epochs of each source in a run of `rows`, as GPT-3's table 2.2."""
        sizes = [_Stream(source.plan(1, 0)).rows for source in self.sources]
        return [MixtureRow(name, size, weight, weight * rows / size)
                for name, size, weight in zip(self.names, sizes, self.weights, strict=True)]  # fmt: skip


class _Stream:
    """Rows of a source in its own order, epoch after epoch. `rows`: of the first."""

    def __init__(self, plan: Plan):
        self._plan, self._ends, self._orders = plan, [0], {}
        self.rows = len(self._order(0))

    def _order(self, epoch: int) -> list[Any]:
        if epoch not in self._orders:
            self._orders = {epoch: [key for batch in self._plan(epoch) for key in batch]}  # one at a time
            if epoch == len(self._ends) - 1:
                self._ends.append(self._ends[-1] + len(self._orders[epoch]))
        return self._orders[epoch]

    def take(self, first: int, count: int) -> list[Any]:
        while self._ends[-1] < first + count:
            self._order(len(self._ends) - 1)
        taken: list[Any] = []
        while len(taken) < count:
            at = first + len(taken)
            epoch = bisect_right(self._ends, at) - 1
            start = at - self._ends[epoch]
            taken += self._order(epoch)[start : start + count - len(taken)]
        return taken


def direction_repeats(pairs: Mapping[tuple[str, str], int], temperature: float) -> dict[tuple[str, str], float]:
    """Repeats of each direction's pairs per epoch, by M2M100's Sinkhorn temperature sampling: each language has one
    share as source and as target, in proportion to its pairs^(1/T), as far as the directions that exist allow. The
    number of all pairs stays."""
    directions = {direction: count for direction, count in pairs.items() if count}
    languages = sorted({language for direction in directions for language in direction})
    at = {language: number for number, language in enumerate(languages)}
    shares = np.zeros((len(languages), len(languages)))
    for (a, b), count in directions.items():
        shares[at[a], at[b]] = count ** (1 / temperature)
    sizes = [sum(n for direction, n in directions.items() if language in direction) for language in languages]
    wanted = np.array(temperature_weights(sizes, temperature))
    for _ in range(SINKHORN):  # both at once: one after the other favours the last where directions are missing
        rows, columns = (np.sqrt(np.divide(wanted, own, out=np.zeros_like(own), where=own > 0))
                         for own in (shares.sum(1), shares.sum(0)))  # fmt: skip
        shares *= rows[:, None] * columns
    shares *= sum(directions.values()) / shares.sum()
    return {(a, b): float(shares[at[a], at[b]]) / count for (a, b), count in directions.items()}
