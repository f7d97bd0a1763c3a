"""Made data for learning in context: few-shot episodes of small tasks, and points of random functions."""

import random as python_random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.batching import pad_rows
from multimodal.data.datasets.text import IGNORED, TokenBatch

ARROW, STOP, WORDS = 10, 11, 12  # ids: digits 0 to 9, then these; words come in pairs of opposites
PAIRS = 8
VOCABULARY = WORDS + 2 * PAIRS

Tokens = list[int]
Example = tuple[Tokens, Tokens]


def _word(random: python_random.Random) -> int:
    return WORDS + random.randrange(2 * PAIRS)


def _digits(random: python_random.Random) -> Tokens:
    return [random.randrange(10), random.randrange(10)]


def _copy(random: python_random.Random) -> Callable[[], Example]:
    given = random.choice([lambda: [_word(random)], lambda: _digits(random)])
    return lambda: (same := given(), same)


def _antonym(random: python_random.Random) -> Callable[[], Example]:
    return lambda: ([word := _word(random)], [WORDS + ((word - WORDS) ^ 1)])


def _sum(random: python_random.Random) -> Callable[[], Example]:
    return lambda: (digits := _digits(random), list(divmod(sum(digits), 10)))


# name → the examples of an episode. The first input of copy may be one of antonym or of sum: examples tell the task
TASKS: dict[str, Callable[[python_random.Random], Callable[[], Example]]] = {
    "copy": _copy, "antonym": _antonym, "sum": _sum,
}  # fmt: skip


def episode(task: str, shots: int, random: python_random.Random) -> tuple[Tokens, Tokens]:
    """Ids of `shots` + 1 examples `input : output ;` of one task, and of each id the number of the example whose output
    it is, or -1."""
    example = TASKS[task](random)
    ids, outputs = [], []
    for number in range(shots + 1):
        given, answer = example()
        ids += [*given, ARROW, *answer, STOP]
        outputs += [*[-1] * (len(given) + 1), *[number] * len(answer), -1]
    return ids, outputs


class Episodes(NamedTuple):
    """`batch`: targets are the outputs' tokens alone. `shots`: for each target the number of examples before it."""

    batch: TokenBatch
    shots: Int[Tensor, "B T"]


def episodes(tasks: list[str], rows: int, shots: int, random: torch.Generator) -> Episodes:
    """Draw `rows` episodes, each of a random one of the `tasks`."""
    own = python_random.Random(int(torch.randint(2**62, (), generator=random)))
    made = [episode(own.choice(tasks), shots, own) for _ in range(rows)]
    ids = pad_rows([ids[:-1] for ids, _ in made])
    targets = pad_rows([ids[1:] for ids, _ in made], IGNORED)
    before = pad_rows([outputs[1:] for _, outputs in made], -1)
    return Episodes(TokenBatch(ids, targets.masked_fill(before < 0, IGNORED)), before)


class MadeBatches:
    """The loader's source of `steps` batches, each made from its own generator."""

    def __init__(self, steps: int, make: Callable[[torch.Generator], Any]):
        self.steps, self.make = steps, make

    def __len__(self) -> int:
        return self.steps

    def name(self, key: int) -> str:
        return f"batch {key}"

    def read(self, key: int) -> int:
        return key

    def prepare(self, key: int, random: torch.Generator) -> Any:
        return self.make(random)

    def collate(self, batches: Sequence[Any]) -> Any:
        return batches[0]

    def plan(self, epoch: int) -> list[list[int]]:
        return [[key] for key in range(self.steps)]


FUNCTIONS = ("linear", "sparse")  # of `points`


def points(
    kind: str, rows: int, count: int, dims: int, random: torch.Generator
) -> tuple[Float[Tensor, "B P E"], Float[Tensor, "B P"]]:
    """Points of random functions, one per row (Garg et al. 2022, section 2): inputs from N(0, I), outputs of variance
    1. `linear`: weights from N(0, I). `sparse`: all but one of them are 0."""
    x = torch.randn(rows, count, dims, generator=random)
    weights = torch.randn(rows, dims, 1, generator=random)
    if kind == "sparse":
        only = torch.randint(dims, (rows,), generator=random)
        return x, x[torch.arange(rows), :, only] * weights[:, 0]
    return x, (x @ weights)[..., 0] / dims**0.5


def least_squares(x: Float[Tensor, "B P E"], y: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
    """Predict each output by least squares on the points before it, of the smallest norm where they are too few."""
    guesses = torch.zeros_like(y)
    for count in range(1, y.shape[1]):
        weights = torch.linalg.pinv(x[:, :count].double()) @ y[:, :count, None].double()
        guesses[:, count] = (x[:, count, None].double() @ weights)[:, 0, 0].float()
    return guesses
