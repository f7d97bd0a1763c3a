"""Examples in memory as the loader's source."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from multimodal.data.batching import bucketed
from multimodal.data.loader import Plan, generator

Example = TypeVar("Example")


class SizedExamples(Generic[Example]):
    """Examples as the loader's source, each with its number of tokens. `kind` names one in messages."""

    def __init__(self, examples: Sequence[Example], sizes: Sequence[int], kind: str):
        self.examples, self.sizes, self.kind = examples, sizes, kind

    def __len__(self) -> int:
        return len(self.examples)

    def name(self, key: int) -> str:
        return f"{self.kind} {key}"

    def read(self, key: int) -> Example:
        return self.examples[key]

    def plan(self, budget: int, seed: int) -> Plan:
        """Batches of like length with at most `budget` padded tokens, a pure function of the epoch."""
        return lambda epoch: bucketed(self.sizes, budget, generator(seed, epoch))
