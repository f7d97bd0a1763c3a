"""Decoding: greedy and sampled search over any next-token function; `beams` has beam search.

A step is `step(ids [B T], cache) -> logits [B N V]` of the last N ≥ 1 of the T positions; the caller owns the cache,
and the step appends to it. All that a step knows of a row lies in ids and cache: rows are copied, and left out once
they have ended. A rule is `rule(ids so far [B T], next logits [B V]) -> logits [B V]`, forbids a token with -inf, and
may write into the logits it gets.

Prompts of different length are padded on the left (`left_padded`), and the cache is made with their `start`; a rule
sees `PADDING` there. Rules and results then are those of each prompt alone.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Categorical

from multimodal.blocks.cache import Cache

Step = Callable[[Tensor, Cache], Tensor]
Rule = Callable[[Tensor, Tensor], Tensor]
# tokens [B] of logits [B V] and, for each prompt in the batch, its number, or None once all its rows have ended
Choice = Callable[[Tensor, list[int | None]], Tensor]
PADDING = -1  # what rules see before the first id of a row
PAUSE = 8  # steps between two looks at what has ended, on an accelerator, where each look waits for the device


class Decoded(NamedTuple):
    """New ids a row, without prompt and end token, and the sum of their log-probabilities, end included."""

    ids: list[list[int]]
    logprobs: list[float]


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"]]:
    """Prompts as one batch, and how many ids at the begin of each row are padding: `start` of a cache."""
    size = max(map(len, prompts))
    rows = [[0] * (size - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor([size - len(prompt) for prompt in prompts], device=device)


def over_source(
    decode: Callable[..., Tensor], source: Float[Tensor, "P S D"] | None, valid: Bool[Tensor, "P S"] | None = None
) -> Step:
    """A step of a decoder with cross-attention, `decode(ids, source, valid, cache=cache)`; all beams of one source
    attend to the one copy of it. None for a decoder without."""
    return lambda ids, cache: decode(ids, source, valid, cache=cache)


def greedy(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int | Sequence[int],
    rules: Sequence[Rule] = (),
) -> Decoded:  # fmt: skip
    """The most probable token each time, until every row has ended or has `max_new` tokens (one number, or one a
    prompt). `eos` -1: no token ends a row."""
    return _last(streamed(step, prompt, cache, eos=eos, max_new=max_new, rules=rules))


def streamed(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int | Sequence[int],
    rules: Sequence[Rule] = (), choose: Choice | None = None, copies: int = 1,
) -> Generator[Int[Tensor, "R"], None, Decoded]:  # fmt: skip
    """The tokens of each step as they come, of all rows that are still in the batch, and as the generator's value what
    came of them; `choose` (`drawing`; None: greedy) and `copies` as `sample` has them."""
    choose = choose or (lambda logits, live: logits.argmax(-1))
    return _one_by_one(step, prompt, cache, choose, eos, max_new, rules, copies)


def sample(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int | Sequence[int],
    temperature: float, generators: Sequence[torch.Generator], copies: int = 1, rules: Sequence[Rule] = (),
    narrow: Callable[[Tensor], Tensor] | None = None,
) -> Decoded:  # fmt: skip
    """Tokens drawn from softmax(logits / temperature). The log-probabilities are those at temperature 1.

    `narrow` takes those logits [B V] and puts -inf where nothing shall be drawn, as `rules.top_p` does; the
    log-probabilities do not see it.

    Each prompt gives `copies` rows, which stand together, and draws by its own generator, so that its draws are those
    it would get alone, and with the same seed those of openai-whisper. All generators are on one device."""
    if len(generators) != len(prompt):
        raise ValueError(f"{len(generators)} generators for {len(prompt)} prompts")
    draw = drawing(temperature, generators, copies, narrow)
    return _last(streamed(step, prompt, cache, eos=eos, max_new=max_new, rules=rules, choose=draw, copies=copies))


def drawing(
    temperature: float, generators: Sequence[torch.Generator], copies: int = 1,
    narrow: Callable[[Tensor], Tensor] | None = None,
) -> Choice:  # fmt: skip
    """What `sample` chooses by."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; use greedy for 0 ({temperature})")

    def draw(logits: Tensor, live: list[int | None]) -> Tensor:
        tempered = logits / temperature if narrow is None else narrow(logits / temperature)
        chances = Categorical(logits=tempered, validate_args=False).probs.to(generators[0].device)
        tokens = torch.zeros(len(logits), dtype=torch.long, device=chances.device)
        for at, number in enumerate(live):
            if number is not None:
                own = slice(at * copies, (at + 1) * copies)
                tokens[own] = torch.multinomial(chances[own], 1, generator=generators[number])[:, 0]
        return tokens.to(logits.device)

    return draw


def _last(steps: Generator[Tensor, None, Decoded]) -> Decoded:
    """What comes of all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def limits_of(max_new: int | Sequence[int], prompt: Int[Tensor, "B T"], cache: Cache) -> list[int]:
    """Tokens that each prompt may get. A padded batch runs on for its longest answer, so the model cannot tell that
    a row has left its context: that is told here."""
    limits = [max_new] * len(prompt) if isinstance(max_new, int) else list(max_new)
    if len(limits) != len(prompt):
        raise ValueError(f"max_new has {len(limits)} limits for {len(prompt)} prompts")
    if cache.start is not None and cache.context is not None:
        for size, limit in zip((prompt.shape[1] - cache.start).tolist(), limits, strict=True):
            if size + limit - 1 > cache.context:
                raise ValueError(f"max_new {limit} after {size} ids leaves the context {cache.context}")
    return limits


def next_logits(step: Step, new: Tensor, cache: Cache, ids: Tensor, rules: Sequence[Rule]) -> Float[Tensor, "B V"]:
    logits = step(new, cache)[:, -1]
    # rules write into their own copy, and passes over the vocabulary want it in a row
    logits = logits.to(torch.float32, copy=bool(rules), memory_format=torch.contiguous_format)
    if rules and cache.start is not None:
        ids = ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < cache.start[:, None], PADDING)
    for rule in rules:
        logits = rule(ids, logits)
    return logits


def rows_of(places: list[int], width: int, device: torch.device) -> Int[Tensor, "R"]:
    """The rows of the prompts at these places, `width` each."""
    firsts = torch.tensor(places, device=device)[:, None] * width
    return (firsts + torch.arange(width, device=device)).flatten()


@torch.inference_mode()
def _one_by_one(
    step: Step, prompt: Tensor, cache: Cache, choose: Choice, eos: int, max_new: int | Sequence[int],
    rules: Sequence[Rule], copies: int,
) -> Generator[Tensor, None, Decoded]:  # fmt: skip
    limits = limits_of(max_new, prompt, cache)
    limit = torch.tensor(limits, device=prompt.device).repeat_interleave(copies)
    if max(limits) < 1:
        return Decoded([[] for _ in limit], [0.0] * len(limit))
    ids, new, sums, ended = prompt, prompt, torch.zeros(len(limit), device=prompt.device), limit <= 0
    live: list[int | None] = [number if most > 0 else None for number, most in enumerate(limits)]
    numbers, found = list(range(len(prompt))), {}

    def take(places: list[int]) -> None:
        made = ids[:, prompt.shape[1] :].unflatten(0, (-1, copies))
        for at in places:
            number = numbers[at]
            rows = [_until(row[: limits[number]], eos) for row in made[at].tolist()]
            found[number] = rows, sums[at * copies : (at + 1) * copies].tolist()

    for count in range(1, max(limits) + 1):
        logits = next_logits(step, new, cache, ids, rules)
        if count == 1 and copies > 1:
            spread = torch.arange(len(prompt), device=ids.device).repeat_interleave(copies)
            logits, ids = logits[spread], ids[spread]
            cache.reorder_rows(spread)
        token = torch.where(ended, max(eos, 0), choose(logits, live))
        sums += torch.where(ended, 0, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
        ended |= (token == eos) | (limit <= count)
        new = token[:, None]
        ids = torch.cat([ids, new], 1)
        yield token
        if ids.device.type != "cpu" and count % PAUSE:
            continue
        over = ended.unflatten(0, (-1, copies)).all(1).tolist()
        live = [None if done else number for number, done in zip(numbers, over, strict=True)]
        if all(over):
            break
        if 2 * sum(over) >= len(over):  # half of the batch only waits: the others go on without it
            take([at for at, done in enumerate(over) if done])
            kept = [at for at, done in enumerate(over) if not done]
            numbers = live = [numbers[at] for at in kept]
            rows = rows_of(kept, copies, ids.device)
            ids, new, sums, ended, limit = ids[rows], new[rows], sums[rows], ended[rows], limit[rows]
            cache.reorder_rows(rows)
            cache.reorder_sources(rows_of(kept, 1, ids.device))
    take(list(range(len(numbers))))
    ordered = [found[number] for number in range(len(prompt))]
    return Decoded([row for rows, _ in ordered for row in rows], [total for _, totals in ordered for total in totals])


def _until(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids
