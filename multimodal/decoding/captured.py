"""Searches inside of a CUDA graph: logits processors, choice and end are replayed with the decoder's step, so that a
token costs the host one launch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.logits import History, Replayed
from multimodal.decoding.sampling import PADDING, LogitsProcessor


@runtime_checkable
class SearchRules(Protocol):
    """Rules of a search after each step. `key`: equal for rules that may share a graph; `width`: rows of a prompt."""

    @property
    def key(self) -> tuple[Any, ...]: ...

    @property
    def width(self) -> int: ...

    def state(self, rows: int, capacity: int, vocabulary: int, device: torch.device) -> "SearchState": ...


# (rules, rows, vocabulary) -> the state of a search, and a function that makes the next token of each row: moves a
# cache after its prompt into a slot that has both
Start = Callable[[SearchRules, int, int], tuple[Any, Callable[[], None]]]


class SearchState(ABC):
    """Buffers of a search over R rows: ids at their positions, sums of log-probabilities and newest tokens."""

    def __init__(self, processors: Sequence[Replayed], rows: int, capacity: int, device: torch.device):
        self.processors = processors
        self.ids = torch.zeros(rows, capacity + 1, dtype=torch.long, device=device)
        self.first = torch.zeros(1, dtype=torch.long, device=device)
        self.sums = torch.zeros(rows, dtype=torch.float32, device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in vars(self).values() if isinstance(one, Tensor))

    def begin(self, prompt: Int[Tensor, "B T"], start: Int[Tensor, "B"] | None) -> None:
        """Begin with the prompt of the first B rows, of which `start` ids each are padding."""
        count, size = prompt.shape
        self.ids.zero_()  # padding of the last search would be no index in the rows that are unused now
        self.ids[:count, :size] = prompt
        if start is not None:
            self.ids[:count, :size].masked_fill_(torch.arange(size, device=start.device) < start[:, None], PADDING)
        self.first.fill_(size)
        self.sums.zero_()

    @abstractmethod
    def take(self, cache: Cache, logits: Float[Tensor, "B V"], at: Int[Tensor, "1"]) -> None:
        """Choose the tokens of the first B rows at position `at`."""

    def processed(self, logits: Float[Tensor, "R V"], at: Int[Tensor, "1"]) -> Float[Tensor, "R V"]:
        """Logits after the processors; `at`: position of the newest id. They write in place."""
        history = History(self.ids, at, self.first)
        for one in self.processors:
            logits = one.replayed(history, logits)
        return logits


def replayable(processors: Sequence[LogitsProcessor], prompt: Int[Tensor, "B T"]) -> tuple[Replayed, ...] | None:
    """None if a processor cannot be replayed after this prompt."""
    if not all(isinstance(one, Replayed) and one.start in (None, prompt.shape[1]) for one in processors):
        return None
    return tuple(processors)
