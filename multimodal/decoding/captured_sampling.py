"""Greedy decoding and sampling inside of a CUDA graph. Random numbers are drawn before each step, since a graph's own
would not be the caller's."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.captured import SearchState, Start, replayable
from multimodal.decoding.logits import Replayed, SamplingFilter
from multimodal.decoding.sampling import (
    CHECK_EVERY,
    Ends,
    LogitsProcessor,
    MultinomialSampler,
    SampledTokens,
    Sampler,
    Step,
    drawn,
    ends_of,
    is_end,
    length_limits,
    logprobs_of,
    most_probable,
    next_logits,
    until,
)


class SamplingRules(NamedTuple):
    """The tokens that end a row, processors, and how tokens are chosen: by `temperature` and `narrow`, or
    the most probable one (temperature 0)."""

    ends: tuple[int, ...]
    processors: tuple[Replayed, ...]
    temperature: float = 0.0
    narrow: SamplingFilter | None = None
    width: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        return "sampling", self.ends, self.temperature, self.narrow, tuple(one.key for one in self.processors)

    def state(self, rows: int, capacity: int, vocabulary: int, device: torch.device) -> "SamplingState":
        return SamplingState(self, rows, capacity, vocabulary, device)


def sampling_rules(
    processors: Sequence[LogitsProcessor], eos: Ends, prompt: Int[Tensor, "B T"], choose: Sampler | None, copies: int
) -> SamplingRules | None:
    """None if something of it cannot be replayed after this prompt. `choose`: None for greedy decoding."""
    replayed = replayable(processors, prompt)
    if replayed is None or (choose is None and copies > 1):
        return None
    if choose is None:
        return SamplingRules(ends_of(eos), replayed)
    if not isinstance(choose, MultinomialSampler) or not isinstance(choose.narrow, SamplingFilter | None):
        return None
    return SamplingRules(ends_of(eos), replayed, choose.temperature, choose.narrow, copies)


class SamplingState(SearchState):
    """Ended rows, and how many tokens each may still have. `draws` [R V]: random numbers of the next step."""

    def __init__(self, rules: SamplingRules, rows: int, capacity: int, vocabulary: int, device: torch.device):
        super().__init__(rules.processors, rows, capacity, device)
        self.rules = rules
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.left = torch.zeros(rows, dtype=torch.long, device=device)
        self.draws = torch.ones(rows, vocabulary, dtype=torch.float32, device=device) if rules.temperature else None

    def limit(self, limits: Int[Tensor, "B"]) -> None:
        self.left.zero_()  # of unused rows
        self.left[: len(limits)] = limits
        self.ended.copy_(self.left <= 0)

    def take(self, cache: Cache, logits: Float[Tensor, "B V"], at: Int[Tensor, "1"]) -> None:
        count, rules = len(logits), self.rules
        ended, sums, left = self.ended[:count], self.sums[:count], self.left[:count]
        if self.draws is None:
            token = most_probable(logits)
        else:
            token = drawn(logits, rules.temperature, rules.narrow, self.draws[:count])
        token = token.masked_fill(ended, max(rules.ends[0], 0))
        sums += logprobs_of(logits, token).masked_fill(ended, 0)
        left -= 1
        ended |= is_end(token, rules.ends) | (left <= 0)
        self.token[:count] = token
        self.ids[:count].index_copy_(1, at, token[:, None])


@torch.inference_mode()
def captured_steps(
    start: Start, step: Step, prompt: Int[Tensor, "B T"], cache: Any, rules: SamplingRules,
    max_new: int | Sequence[int], sampler: MultinomialSampler | None,
) -> Generator[Int[Tensor, "R"], None, SampledTokens]:  # fmt: skip
    """As `sampling.generate_steps`, with tokens that are valid until the next step."""
    limits, size, copies = length_limits(max_new, prompt, cache), prompt.shape[1], rules.width
    limit = torch.tensor(limits, device=prompt.device).repeat_interleave(copies)
    if max(limits) < 1:
        return SampledTokens([[] for _ in limit], [0.0] * len(limit))
    logits = next_logits(step, prompt, cache, prompt, rules.processors)
    if copies > 1:
        spread = torch.arange(len(prompt), device=prompt.device).repeat_interleave(copies)
        logits, prompt = logits[spread], prompt[spread]
        cache.reorder_rows(spread)
    count = len(prompt)
    state, advance = start(rules, count, logits.shape[1])
    state.begin(prompt, cache.start)
    state.limit(limit)
    live: list[int | None] = [number if most > 0 else None for number, most in enumerate(limits)]
    for made in range(1, max(limits) + 1):
        if sampler is not None:
            sampler.fill(state.draws[:count], live)
        if made == 1:
            state.take(cache, logits, state.first)
        else:
            advance()
        yield state.token[:count]
        if prompt.device.type == "cpu" or made % CHECK_EVERY == 0:
            over = state.ended[:count].unflatten(0, (-1, copies)).all(1).tolist()
            live = [None if done else number for number, done in enumerate(over)]
            if all(over):
                break
    rows, sums = state.ids[:count, size : size + made].tolist(), state.sums[:count].tolist()
    each = [limits[number // copies] for number in range(count)]
    return SampledTokens([until(row[:most], rules.ends) for row, most in zip(rows, each, strict=True)], sums)
