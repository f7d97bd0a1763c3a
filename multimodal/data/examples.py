"""Examples in memory as the loader's source, and a cache of what is slow to read."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

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


class SizedCache(dict[Any, Any]):
    """Cache of up to `room` bytes, by `size` of a value; what exceeds it is made again each time."""

    def __init__(self, room: int, size: Callable[[Any], int]):
        super().__init__()
        self.room, self.size = room, size

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        if key in self:
            return self[key]
        value = make()
        self.room -= self.size(value)
        if self.room >= 0:
            self[key] = value
        return value
