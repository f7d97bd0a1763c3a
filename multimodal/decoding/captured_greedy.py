"""Greedy decoding inside of a CUDA graph: logits processors, choice, log-probability and end are replayed with the
step, so that a token costs the host one launch."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.decoding.logits import History, Replayed
from multimodal.decoding.sampling import (
    CHECK_EVERY,
    LogitsProcessor,
    SampledTokens,
    Step,
    length_limits,
    most_probable,
    until,
)
from multimodal.decoding.sampling import next_logits as first_logits


class GreedyRules(NamedTuple):
    """The token that ends a row (-1: none), and processors that can be replayed."""

    eos: int
    processors: tuple[Replayed, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for rules that may share a graph."""
        return self.eos, tuple(one.key for one in self.processors)


def greedy_rules(
    processors: Sequence[LogitsProcessor], eos: int, prompt: Int[Tensor, "B T"]
) -> GreedyRules | None:  # fmt: skip
    """None if a processor cannot be replayed after this prompt."""
    if not all(isinstance(one, Replayed) and one.start in (None, prompt.shape[1]) for one in processors):
        return None
    return GreedyRules(eos, tuple(processors))


class GreedyState:
    """Buffers of a search over R rows: ids at their positions, sums of log-probabilities, ended rows, and how many
    tokens each may still have."""

    def __init__(self, rules: GreedyRules, rows: int, capacity: int, device: torch.device):
        self.rules = rules
        zeros = lambda *size, kind=torch.long: torch.zeros(*size, dtype=kind, device=device)
        self.ids, self.first = zeros(rows, capacity + 1), zeros(1)
        self.sums, self.ended, self.left = zeros(rows, kind=torch.float32), zeros(rows, kind=torch.bool), zeros(rows)
        self.token = zeros(rows)

    def begin(self, prompt: Int[Tensor, "B T"], limits: Sequence[int]) -> None:
        count, size = prompt.shape
        self.ids[:count, :size] = prompt
        self.first.fill_(size)
        self.sums.zero_()
        self.left.zero_()  # of unused rows
        self.left[:count] = torch.tensor(limits, device=prompt.device)
        self.ended.copy_(self.left <= 0)

    def take(self, logits: Float[Tensor, "B V"], at: Int[Tensor, "1"]) -> None:
        """Append the most probable token of the first B rows at position `at`."""
        count, eos = len(logits), self.rules.eos
        ended, sums, left = self.ended[:count], self.sums[:count], self.left[:count]
        token = most_probable(logits).masked_fill(ended, max(eos, 0))
        sums += logits.log_softmax(-1).gather(1, token[:, None])[:, 0].masked_fill(ended, 0)
        left -= 1
        ended |= (token == eos) | (left <= 0)
        self.token[:count] = token
        self.ids[:count].index_copy_(1, at, token[:, None])

    def processed(self, logits: Float[Tensor, "R V"], at: Int[Tensor, "1"]) -> Float[Tensor, "R V"]:
        """Logits after the processors; `at`: position of the newest id. They write in place."""
        history = History(self.ids, at, self.first)
        for one in self.rules.processors:
            logits = one.replayed(history, logits)
        return logits


@torch.inference_mode()
def greedy_steps(
    start: Any, step: Step, prompt: Int[Tensor, "B T"], cache: Any, rules: GreedyRules, max_new: int | Sequence[int]
) -> Generator[Int[Tensor, "B"], None, SampledTokens]:
    """As `sampling.generate_steps`, with tokens that are valid until the next step. `start(rows)` moves the cache after
    the prompt into a slot with the state of this search, and returns it and a function that advances it."""
    limits, (count, size) = length_limits(max_new, prompt, cache), prompt.shape
    if max(limits) < 1:
        return SampledTokens([[] for _ in limits], [0.0] * count)
    logits = first_logits(step, prompt, cache, prompt, rules.processors)
    state, advance = start(count)
    state.begin(prompt, limits)
    state.take(logits, state.first)
    yield state.token[:count]
    made = 1
    while made < max(limits):
        if (prompt.device.type == "cpu" or made % CHECK_EVERY == 0) and bool(state.ended[:count].all()):
            break
        advance()
        made += 1
        yield state.token[:count]
    rows = state.ids[:count, size : size + made].tolist()
    sums = state.sums[:count].tolist()
    return SampledTokens([until(row[:limit], rules.eos) for row, limit in zip(rows, limits, strict=True)], sums)
