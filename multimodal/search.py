"""Decoding: greedy, sampled and beam search over any next-token function.

A step is `step(ids [B T], cache) -> logits [B N V]` of the last N ≥ 1 of the T positions; the caller owns the cache,
and the step appends to it. All that a step knows of a row lies in ids and cache: rows are copied, and left out once
they have ended. A rule is `rule(ids so far [B T], next logits [B V]) -> logits [B V]`, forbids a token with -inf, and
may write into the logits it gets.

Prompts of different length are padded on the left (`left_padded`), and the cache is made with their `start`. Rules
and results then are those of each prompt alone.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributions import Categorical

from multimodal.blocks.cache import Cache

Step = Callable[[Tensor, Cache], Tensor]
Rule = Callable[[Tensor, Tensor], Tensor]
Norm = Callable[[int], float]  # what the log-probability of so many new tokens, the end apart, is divided by
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
    decode: Callable[..., Tensor], source: Float[Tensor, "P S D"], valid: Bool[Tensor, "P S"] | None = None
) -> Step:
    """A step of a decoder with cross-attention, `decode(ids, source, valid, cache=cache)`; all beams of one source
    attend to the one copy of it."""
    return lambda ids, cache: decode(ids, source, valid, cache=cache)


def greedy(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int | Sequence[int],
    rules: Sequence[Rule] = (),
) -> Decoded:  # fmt: skip
    """The most probable token each time, until every row has ended or has `max_new` tokens (one number, or one a
    prompt)."""
    return _one_by_one(step, prompt, cache, lambda logits, live: logits.argmax(-1), eos, max_new, rules)


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
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; use greedy for 0 ({temperature})")
    if len(generators) != len(prompt):
        raise ValueError(f"{len(generators)} generators for {len(prompt)} prompts")

    def draw(logits: Tensor, live: list[int | None]) -> Tensor:
        tempered = logits / temperature if narrow is None else narrow(logits / temperature)
        chances = Categorical(logits=tempered, validate_args=False).probs.to(generators[0].device)
        tokens = torch.zeros(len(logits), dtype=torch.long, device=chances.device)
        for at, number in enumerate(live):
            if number is not None:
                own = slice(at * copies, (at + 1) * copies)
                tokens[own] = torch.multinomial(chances[own], 1, generator=generators[number])[:, 0]
        return tokens.to(logits.device)

    return _one_by_one(step, prompt, cache, draw, eos, max_new, rules, copies)


def _limits(max_new: int | Sequence[int], prompt: Int[Tensor, "B T"], cache: Cache) -> list[int]:
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


def _next_logits(step: Step, new: Tensor, cache: Cache, ids: Tensor, rules: Sequence[Rule]) -> Float[Tensor, "B V"]:
    logits = step(new, cache)[:, -1]
    # rules write into their own copy, and passes over the vocabulary want it in a row
    logits = logits.to(torch.float32, copy=bool(rules), memory_format=torch.contiguous_format)
    for rule in rules:
        logits = rule(ids, logits)
    return logits


def _rows(places: list[int], width: int, device: torch.device) -> Int[Tensor, "R"]:
    """The rows of the prompts at these places, `width` each."""
    firsts = torch.tensor(places, device=device)[:, None] * width
    return (firsts + torch.arange(width, device=device)).flatten()


@torch.inference_mode()
def _one_by_one(
    step: Step, prompt: Tensor, cache: Cache, choose: Callable[[Tensor, list[int | None]], Tensor], eos: int,
    max_new: int | Sequence[int], rules: Sequence[Rule], copies: int = 1,
) -> Decoded:  # fmt: skip
    """`choose` gets the logits and, for each prompt in the batch, its number, or None once all its rows have ended."""
    limits = _limits(max_new, prompt, cache)
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
        logits = _next_logits(step, new, cache, ids, rules)
        if count == 1 and copies > 1:
            spread = torch.arange(len(prompt), device=ids.device).repeat_interleave(copies)
            logits, ids = logits[spread], ids[spread]
            cache.reorder_rows(spread)
        token = torch.where(ended, eos, choose(logits, live))
        sums += torch.where(ended, 0, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
        ended |= (token == eos) | (limit <= count)
        new = token[:, None]
        ids = torch.cat([ids, new], 1)
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
            rows = _rows(kept, copies, ids.device)
            ids, new, sums, ended, limit = ids[rows], new[rows], sums[rows], ended[rows], limit[rows]
            cache.reorder_rows(rows)
            cache.reorder_sources(_rows(kept, 1, ids.device))
    take(list(range(len(numbers))))
    ordered = [found[number] for number in range(len(prompt))]
    return Decoded([row for rows, _ in ordered for row in rows], [total for _, totals in ordered for total in totals])


def _until(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids


@dataclass
class _Prompt:
    """One prompt of a beam search: `limit` new tokens at most; (ids, score) of each sequence that has ended, in
    order, and of the chosen ones, the best first, once there is no more to be won."""

    limit: int
    ended: list[tuple[list[int], float]] = field(default_factory=list)
    chosen: list[tuple[list[int], float]] | None = None


@torch.inference_mode()
def beam(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int | Sequence[int], beams: int,
    rules: Sequence[Rule] = (), length_penalty: float | Norm | None = None, patience: float = 1.0,
    scorer: Rule | None = None, keep: int = 1,
) -> Decoded:  # fmt: skip
    """Beam search as in openai-whisper: a prompt is done when `beams`·`patience` sequences have ended
    (Kasai et al. 2022) or at its `max_new`, and the best of them is returned. With `patience` infinite it goes on
    until no going sequence can still win, since a sure model fills the places with poor endings before its answer
    is done; that is transformers' `early_stopping="never"`, but that what was cut at `max_new` is only returned where
    too few have ended.

    `length_penalty` None ranks by mean log-probability, α by sum / ((5 + length) / 6)^α (Wu et al. 2016), so 0
    by the sum; a function of the length, rising or falling all the way, is divided by as it is (`per_token`).
    `scorer` turns (ids, log-probabilities) into the scores to add up, as for joint CTC decoding; with one all prompts
    stay in the batch to the end. The `keep` ≤ `beams` best of each prompt stand together, the best first; a place that
    no sequence takes has no ids and -inf."""
    wanted = beams * patience if math.isinf(patience) else round(beams * patience)
    if beams < 1 or wanted < 1 or not 1 <= keep <= beams:
        raise ValueError(f"beams {beams} with patience {patience} leave nothing to search, or not {keep} to keep")
    none = [([], 0.0)] * keep
    prompts = [_Prompt(limit, chosen=None if limit > 0 else none) for limit in _limits(max_new, prompt, cache)]
    ids, new, sums, held = prompt, prompt, torch.zeros(len(prompt), device=prompt.device), prompts
    for count in range(1, max(one.limit for one in prompts) + 1):
        scores = _next_logits(step, new, cache, ids, rules).log_softmax(-1)
        scores = scores if scorer is None else scorer(ids, scores)
        rows, tokens, kept = _best(scores, sums, ids[:, prompt.shape[1] :], eos, beams, held, wanted)
        if rows != list(range(len(ids))):
            cache.reorder_rows(torch.tensor(rows, device=ids.device))
        new = torch.tensor(tokens, device=ids.device)[:, None]
        ids = torch.cat([ids[rows], new], 1)
        for at, one in enumerate(held):
            own = slice(at * beams, (at + 1) * beams)
            if one.chosen is None and (
                count >= one.limit or _settled(one, max(kept[own]), wanted, keep, count, length_penalty)
            ):
                made = ids[own, prompt.shape[1] :].tolist()
                one.chosen = _ranked(one.ended, made, kept[own], math.isinf(wanted), length_penalty)[:keep]
        going = [at for at, one in enumerate(held) if one.chosen is None]
        if not going:
            break
        if scorer is None and 2 * len(going) <= len(held):
            left = _rows(going, beams, ids.device)
            ids, new, kept = ids[left], new[left], [kept[row] for row in left.tolist()]
            held = [held[at] for at in going]
            cache.reorder_rows(left)
            cache.reorder_sources(_rows(going, 1, ids.device))
        sums = torch.tensor(kept, device=sums.device)
    chosen = [row for one in prompts for row in (one.chosen + [([], -math.inf)] * keep)[:keep]]
    return Decoded([row for row, _ in chosen], [score for _, score in chosen])


def _best(
    scores: Float[Tensor, "R V"], sums: Float[Tensor, "R"], made: Int[Tensor, "R T"], eos: int, beams: int,
    prompts: list[_Prompt], wanted: int | float,
) -> tuple[list[int], list[int], list[float]]:  # fmt: skip
    """Source row, token and score of the `beams` best continuations of each prompt; those that end are put in
    its `ended`, unless it is full."""
    top = scores.topk(min(beams + 1, scores.shape[1]))
    totals = (sums[:, None] + top.values).nan_to_num(nan=-torch.inf).tolist()
    followers, width = top.indices.tolist(), len(scores) // len(prompts)
    rows, tokens, kept = [], [], []
    for group, one in enumerate(prompts):
        own = range(group * width, (group + 1) * width)
        pairs = [(totals[row][i], row, token) for row in own for i, token in enumerate(followers[row])]
        going = []
        for total, row, token in sorted(pairs, key=lambda pair: -pair[0]):
            if token != eos:
                going.append((total, row, token))
            elif len(one.ended) < wanted:
                one.ended.append((made[row].tolist(), total))
            if len(going) == beams:
                break
        # a vocabulary smaller than the beam leaves places, which no continuation of theirs can win
        going += [(-torch.inf, *(going or pairs)[-1][1:])] * (beams - len(going))
        for column, values in zip((kept, rows, tokens), zip(*going, strict=True), strict=True):
            column.extend(values)
    return rows, tokens, kept


def _settled(
    one: _Prompt, going: float, wanted: int | float, keep: int, count: int, alpha: float | Norm | None
) -> bool:
    """Whether a prompt is done: its places are full, or no going sequence can overtake the `keep` best that ended."""
    if not math.isinf(wanted):
        return len(one.ended) >= wanted
    if len(one.ended) < keep:
        return False
    last = heapq.nlargest(keep, map(partial(_score, alpha=alpha), one.ended))[-1]
    # log-probabilities only fall, and the longest or the shortest sequence to come is divided by the most
    return last >= going / max(_norm(count, alpha), _norm(one.limit, alpha))


def _ranked(
    ended: list[tuple[list[int], float]], rows: list[list[int]], scores: list[float], apart: bool,
    alpha: float | Norm | None,
) -> list[tuple[list[int], float]]:  # fmt: skip
    """The ended sequences and the others, the best first: the others after them where `apart`, else among them, as
    many as fill the beams."""
    others = sorted(zip(rows, scores, strict=True), key=lambda pair: -pair[1])
    pool = ended if apart else ended + others[: max(len(rows) - len(ended), 0)]
    ranked = sorted(pool, key=lambda row: -_score(row, alpha)) + (others if apart else [])
    return [row for row in ranked if row[1] > -math.inf] or ranked[:1]


def best(found: Decoded, length_penalty: float | None = None) -> tuple[list[int], float]:
    """The row with the best score (see `beam`), of rows that answer one prompt."""
    return max(zip(*found, strict=True), key=partial(_score, alpha=length_penalty))


def per_token(alpha: float) -> Norm:
    """tokens^α, the end counted as one, as transformers' `length_penalty`: 1 ranks by the mean, 0 by the sum."""
    return lambda length: float(length + 1) ** alpha


def _score(row: tuple[list[int], float], alpha: float | Norm | None) -> float:
    return row[1] / _norm(len(row[0]), alpha)


def _norm(length: int, alpha: float | Norm | None) -> float:
    if callable(alpha):
        return alpha(length)
    return float(max(length, 1)) if alpha is None else ((5 + length) / 6) ** alpha
