"""Greedy decoding and sampling from any next-token function.

A step is `step(ids [B T], cache) -> logits [B N V]` of the last N ≥ 1 of T positions. The caller owns the cache and the
step appends to it. A step depends on ids and cache alone, so rows can be copied, and dropped once they have ended. A
logits processor is `processor(ids so far [B T], next logits [B V]) -> logits [B V]`; it forbids tokens with -inf and
may write in place. One that keeps a state of each row has `reorder_rows(rows [R])`, called between two steps of a beam
search: the rows that those of the next call continue.

Prompts of different length are left-padded (`left_pad`), with a cache made for their `start`; processors see `PADDING`
there. Each prompt then gets the result that it gets alone."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Categorical

from multimodal.blocks.cache import Cache

Step = Callable[[Tensor, Cache], Tensor]
Ends = int | Sequence[int]  # the token that ends a row, or several; -1 or none: no token does
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
StopRule = Callable[[Tensor], Tensor]  # ids so far [B T] as processors see them -> bool [B]: the row ends here
# (logits [B V], number of each prompt in the batch or None once all its rows have ended) -> tokens [B] and their
# log-probabilities [B]
Sampler = Callable[[Tensor, list[int | None]], tuple[Tensor, Tensor]]
PADDING = -1  # the id that processors see before a row's first
PIECE = 128  # of a vocabulary that is searched for its best
CHECK_EVERY = 8  # steps between checks for ended rows on an accelerator, where each check waits for the device


class SampledTokens(NamedTuple):
    """New ids of each row without prompt and end, and the sum of their log-probabilities with the end's."""

    ids: list[list[int]]
    logprobs: list[float]


def left_pad(
    prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"]]:
    """Prompts as one batch, and the number of padding ids in each row: `start` of a cache."""
    size = max(map(len, prompts))
    rows = [[0] * (size - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor([size - len(prompt) for prompt in prompts], device=device)


def cross_attention_step(
    decode: Callable[..., Tensor], source: Float[Tensor, "P S D"] | None, valid: Bool[Tensor, "P S"] | None = None
) -> Step:
    """A step of `decode(ids, source, valid, cache=cache)`. All beams of a source share its copy; None: no source."""
    return lambda ids, cache: decode(ids, source, valid, cache=cache)


def greedy(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: Ends, max_new: int | Sequence[int],
    processors: Sequence[LogitsProcessor] = (), stops: StopRule | None = None,
    interrupt: Callable[[], None] | None = None,
) -> SampledTokens:  # fmt: skip
    """Take the most probable token until each row has ended or has `max_new` tokens (one number, or one per prompt).
    `stops` ends a row that has no end token. `interrupt` is called before each step; what it raises ends the search."""
    steps = generate_steps(step, prompt, cache, eos=eos, max_new=max_new, processors=processors, stops=stops)
    return _last(steps, interrupt)


def generate_steps(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: Ends, max_new: int | Sequence[int],
    processors: Sequence[LogitsProcessor] = (), choose: Sampler | None = None, copies: int = 1,
    stops: StopRule | None = None,
) -> Generator[Int[Tensor, "R"], None, SampledTokens]:  # fmt: skip
    """Yield the tokens of each step, of all rows still in the batch; the generator's value is the result. `choose`: a
    `MultinomialSampler`, None for greedy; `copies`: see `sample`; `stops`: see `greedy`."""
    captured = cache.generate if stops is None else None
    if captured and (steps := captured(step, prompt, eos, max_new, processors, choose, copies)):
        return steps
    best = cache.best or _best
    choose = choose or (lambda logits, live: best(logits))
    return _one_by_one(step, prompt, cache, choose, eos, max_new, processors, copies, stops)


def _best(logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    tokens = most_probable(logits)
    return tokens, logprobs_of(logits, tokens)


def logprobs_of(logits: Float[Tensor, "B V"], tokens: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def most_probable(logits: Float[Tensor, "B V"]) -> Int[Tensor, "B"]:
    """`argmax`, twice as fast on a CPU: search only the piece with the highest peak."""
    whole = logits.shape[1] // PIECE * PIECE
    if whole < 2 * PIECE or logits.device.type != "cpu":
        return logits.argmax(-1)
    first = logits[:, :whole].unflatten(1, (-1, PIECE)).amax(2).argmax(1, keepdim=True) * PIECE
    rest = torch.arange(whole, logits.shape[1], device="cpu").expand(len(logits), -1)
    places = torch.cat([first + torch.arange(PIECE, device="cpu"), rest], 1)
    return places.gather(1, logits.gather(1, places).argmax(1, keepdim=True))[:, 0]


def sample(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: Ends, max_new: int | Sequence[int],
    temperature: float, generators: Sequence[torch.Generator], copies: int = 1,
    processors: Sequence[LogitsProcessor] = (), narrow: Callable[[Tensor], Tensor] | None = None,
    stops: StopRule | None = None, interrupt: Callable[[], None] | None = None,
) -> SampledTokens:  # fmt: skip
    """Sample from softmax(logits / temperature). Log-probabilities are those at temperature 1.

    `narrow` filters these logits [B V] with -inf, as `logits.top_p` does, without changing the log-probabilities.

    Each prompt gives `copies` consecutive rows and has its own generator, so that it samples what it would alone, and
    with the same seed what openai-whisper samples. All generators must be on one device. `stops`, `interrupt`: as for
    `greedy`."""
    if len(generators) != len(prompt):
        raise ValueError(f"{len(generators)} generators for {len(prompt)} prompts")
    draw = MultinomialSampler(temperature, generators, copies, narrow)
    steps = generate_steps(
        step, prompt, cache, eos=eos, max_new=max_new, processors=processors, choose=draw, copies=copies, stops=stops
    )
    return _last(steps, interrupt)


@dataclass(frozen=True)
class MultinomialSampler:
    """The choice of tokens in `sample`. `generators`: on the logits' device."""

    temperature: float
    generators: Sequence[torch.Generator]
    copies: int = 1
    narrow: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self):
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0; use greedy for 0 ({self.temperature})")

    def __call__(self, logits: Float[Tensor, "B V"], live: list[int | None]) -> tuple[Tensor, Tensor]:
        draws = torch.ones_like(logits)
        self.fill(draws, live)
        tokens = drawn(logits, self.temperature, self.narrow, draws)
        return tokens, logprobs_of(logits, tokens)

    def fill(self, draws: Float[Tensor, "B V"], live: list[int | None]) -> None:
        """Draw the random numbers of a step, for the rows of the prompts that still go on."""
        for at, number in enumerate(live):
            if number is not None:
                draws[at * self.copies : (at + 1) * self.copies].exponential_(generator=self.generators[number])


def drawn(
    logits: Float[Tensor, "B V"], temperature: float, narrow: Callable[[Tensor], Tensor] | None,
    draws: Float[Tensor, "B V"],
) -> Int[Tensor, "B"]:  # fmt: skip
    """Tokens from softmax(logits / temperature) by exponentially distributed `draws`, as `torch.multinomial` chooses
    them, which makes the host wait for a GPU."""
    tempered = logits / temperature if narrow is None else narrow(logits / temperature)
    chances = Categorical(logits=tempered, validate_args=False).probs
    return (chances / draws).argmax(-1)


def _last(steps: Generator[Tensor, None, SampledTokens], interrupt: Callable[[], None] | None) -> SampledTokens:
    while True:
        try:
            if interrupt is not None:
                interrupt()
            next(steps)
        except StopIteration as end:
            return end.value


def length_limits(max_new: int | Sequence[int], prompt: Int[Tensor, "B T"], cache: Cache) -> list[int]:
    """Maximum number of new tokens of each prompt. Raises ValueError where a row would leave the context, which the
    model cannot see in a padded batch."""
    limits = [max_new] * len(prompt) if isinstance(max_new, int) else list(max_new)
    if len(limits) != len(prompt):
        raise ValueError(f"max_new has {len(limits)} limits for {len(prompt)} prompts")
    if cache.start is not None and cache.context is not None:
        for size, limit in zip((prompt.shape[1] - cache.start).tolist(), limits, strict=True):
            if size + limit - 1 > cache.context:
                raise ValueError(f"max_new {limit} after {size} ids leaves the context {cache.context}")
    return limits


def next_logits(
    step: Step, new: Tensor, cache: Cache, ids: Tensor, processors: Sequence[LogitsProcessor]
) -> Float[Tensor, "B V"]:
    logits = step(new, cache)[:, -1]
    # processors write into a copy; passes over the vocabulary are faster on contiguous rows
    logits = logits.to(torch.float32, copy=bool(processors), memory_format=torch.contiguous_format)
    if processors:
        ids = without_padding(ids, cache)
    for processor in processors:
        logits = processor(ids, logits)
    return logits


def without_padding(ids: Int[Tensor, "B T"], cache: Cache) -> Int[Tensor, "B T"]:
    """Ids as processors see them."""
    if cache.start is None:
        return ids
    return ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < cache.start[:, None], PADDING)


def rows_of(prompts: list[int], width: int, device: torch.device) -> Int[Tensor, "R"]:
    """The rows of these prompts, `width` each."""
    firsts = torch.tensor(prompts, device=device)[:, None] * width
    return (firsts + torch.arange(width, device=device)).flatten()


@torch.inference_mode()
def _one_by_one(
    step: Step, prompt: Tensor, cache: Cache, choose: Sampler, eos: Ends, max_new: int | Sequence[int],
    processors: Sequence[LogitsProcessor], copies: int, stops: StopRule | None,
) -> Generator[Tensor, None, SampledTokens]:  # fmt: skip
    limits, every = length_limits(max_new, prompt, cache), ends_of(eos)
    limit = torch.tensor(limits, device=prompt.device).repeat_interleave(copies)
    if max(limits) < 1:
        return SampledTokens([[] for _ in limit], [0.0] * len(limit))
    ids, new, ended = prompt, prompt, limit <= 0
    sums = torch.zeros(len(limit), dtype=torch.float32, device=prompt.device)
    live: list[int | None] = [number if most > 0 else None for number, most in enumerate(limits)]
    numbers, results = list(range(len(prompt))), {}

    def take(prompts: list[int]) -> None:
        made, most = ids[:, prompt.shape[1] :].tolist(), limit.tolist()
        for at in prompts:
            own = range(at * copies, (at + 1) * copies)
            results[numbers[at]] = [until(made[i][: most[i]], every) for i in own], [sums[i].item() for i in own]

    for count in range(1, max(limits) + 1):
        logits = next_logits(step, new, cache, ids, processors)
        if count == 1 and copies > 1:
            spread = torch.arange(len(prompt), device=ids.device).repeat_interleave(copies)
            logits, ids = logits[spread], ids[spread]
            cache.reorder_rows(spread)
        token, logprobs = choose(logits, live)
        token, sums = token.masked_fill(ended, max(every[0], 0)), sums + logprobs.masked_fill(ended, 0)
        ended |= is_end(token, every) | (limit <= count)
        new = token[:, None]
        ids = torch.cat([ids, new], 1)
        if stops is not None:
            stopped = stops(without_padding(ids, cache))
            limit, ended = limit.where(~stopped, limit.clamp(max=count)), ended | stopped
        yield token
        if ids.device.type != "cpu" and count % CHECK_EVERY:
            continue
        over = ended.unflatten(0, (-1, copies)).all(1).tolist()
        live = [None if done else number for number, done in zip(numbers, over, strict=True)]
        if all(over):
            break
        if 2 * sum(over) >= len(over):  # half of the batch has ended: continue without it
            take([at for at, done in enumerate(over) if done])
            kept = [at for at, done in enumerate(over) if not done]
            numbers = live = [numbers[at] for at in kept]
            rows = rows_of(kept, copies, ids.device)
            ids, new, sums, ended, limit = ids[rows], new[rows], sums[rows], ended[rows], limit[rows]
            cache.reorder_rows(rows)
            cache.reorder_sources(rows_of(kept, 1, ids.device))
    take(list(range(len(numbers))))
    ordered = [results[number] for number in range(len(prompt))]
    return SampledTokens(
        [row for rows, _ in ordered for row in rows], [total for _, totals in ordered for total in totals]
    )


def ends_of(eos: Ends) -> tuple[int, ...]:
    """The tokens that end a row, at least one: -1 if none does."""
    return (eos,) if isinstance(eos, int) else tuple(eos) or (-1,)


def is_end(tokens: Int[Tensor, "*N"], ends: tuple[int, ...]) -> Bool[Tensor, "*N"]:
    return reduce(or_, [tokens == end for end in ends])


def until(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    """The ids before the first end."""
    return next((ids[:at] for at, token in enumerate(ids) if token in ends), ids)
