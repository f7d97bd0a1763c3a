"""Decoding: greedy, sampled and beam search over any next-token function.

A step is `step(ids [B T], cache) -> logits [B T V]`; the caller owns the cache, and the step appends to it. A rule
is `rule(ids so far [B T], next logits [B V]) -> logits [B V]` and forbids a token with -inf.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache

Step = Callable[[Tensor, Cache], Tensor]
Rule = Callable[[Tensor, Tensor], Tensor]


class Decoded(NamedTuple):
    """New ids a row, without prompt and end token, and the sum of their log-probabilities, end included."""

    ids: list[list[int]]
    logprobs: list[float]


def over_source(
    decode: Callable[..., Tensor], source: Float[Tensor, "B S D"], valid: Bool[Tensor, "B S"] | None = None
) -> Step:
    """A step of a decoder with cross-attention, `decode(ids, source, valid, cache=cache)`.

    Beams of one source share it: it is repeated to as many rows as the search asks for."""
    held = source, valid

    def step(ids: Tensor, cache: Cache) -> Tensor:
        nonlocal held
        if len(ids) != len(held[0]):
            count = len(ids) // len(source)
            held = tuple(None if part is None else part.repeat_interleave(count, 0) for part in (source, valid))
        return decode(ids, *held, cache=cache)

    return step


def greedy(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int, rules: Sequence[Rule] = ()
) -> Decoded:
    """The most probable token each time, until every row has ended or `max_new` tokens are there."""
    return _one_by_one(step, prompt, cache, lambda logits: logits.argmax(-1), eos, max_new, rules)


def sample(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int, temperature: float,
    generator: torch.Generator, rules: Sequence[Rule] = (),
) -> Decoded:  # fmt: skip
    """Tokens drawn from softmax(logits / temperature). The log-probabilities are those at temperature 1."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; use greedy for 0 ({temperature})")

    def draw(logits: Tensor) -> Tensor:
        chances = (logits / temperature).softmax(-1).to(generator.device)
        return torch.multinomial(chances, 1, generator=generator)[:, 0].to(logits.device)

    return _one_by_one(step, prompt, cache, draw, eos, max_new, rules)


@torch.inference_mode()
def _one_by_one(
    step: Step, prompt: Tensor, cache: Cache, choose: Callable[[Tensor], Tensor], eos: int, max_new: int,
    rules: Sequence[Rule],
) -> Decoded:  # fmt: skip
    ids, new = prompt, prompt
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    sums = torch.zeros(len(prompt), device=prompt.device)
    for _ in range(max_new):
        logits = _ruled(step(new, cache)[:, -1].float(), ids, rules)
        token = torch.where(ended, eos, choose(logits))
        sums += torch.where(ended, 0, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
        ended |= token == eos
        new = token[:, None]
        ids = torch.cat([ids, new], 1)
        if ended.all():
            break
    return Decoded([_until(row, eos) for row in ids[:, prompt.shape[1] :].tolist()], sums.tolist())


def _ruled(logits: Float[Tensor, "B V"], ids: Int[Tensor, "B T"], rules: Sequence[Rule]) -> Float[Tensor, "B V"]:
    for rule in rules:
        logits = rule(ids, logits)
    return logits


def _until(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos)] if eos in ids else ids


@torch.inference_mode()
def beam(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: int, max_new: int, beams: int,
    rules: Sequence[Rule] = (), length_penalty: float | None = None, patience: float = 1.0,
    scorer: Rule | None = None,
) -> Decoded:  # fmt: skip
    """Beam search as in openai-whisper: a prompt is done when `beams`·`patience` sequences have ended
    (Kasai et al. 2022), and the best of them is returned. With `patience` infinite it goes on until no going
    sequence can still win, since a sure model fills the places with poor endings before its answer is done.

    `length_penalty` None ranks by mean log-probability, α by sum / ((5 + length) / 6)^α (Wu et al. 2016), so 0
    by the sum. `scorer` turns (ids, log-probabilities) into the scores to add up, as for joint CTC decoding."""
    wanted = beams * patience if math.isinf(patience) else round(beams * patience)
    finished: list[list[tuple[list[int], float]]] = [[] for _ in prompt]
    if beams < 1 or wanted < 1:
        raise ValueError(f"beams {beams} with patience {patience} leave nothing to search")
    ids, new, sums = prompt, prompt, torch.zeros(len(prompt), device=prompt.device)
    for _ in range(max_new):
        scores = _ruled(step(new, cache)[:, -1].float(), ids, rules).log_softmax(-1)
        scores = scores if scorer is None else scorer(ids, scores)
        rows, tokens, kept = _best(scores, sums, ids[:, prompt.shape[1] :], eos, beams, finished, wanted)
        _keep(cache, torch.tensor(rows, device=ids.device), len(ids))
        new = torch.tensor(tokens, device=ids.device)[:, None]
        ids = torch.cat([ids[rows], new], 1)
        sums = torch.tensor(kept, device=sums.device)
        going = sums.unflatten(0, (len(prompt), -1)).amax(1).tolist()
        if all(_settled(*pair, wanted, max_new, length_penalty) for pair in zip(finished, going, strict=True)):
            break
    made, totals = ids[:, prompt.shape[1] :].unflatten(0, (len(prompt), -1)), sums.unflatten(0, (len(prompt), -1))
    chosen = [
        _ranked(ended, rows, scores, 1 if math.isinf(wanted) else beams, length_penalty)
        for ended, rows, scores in zip(finished, made.tolist(), totals.tolist(), strict=True)
    ]
    return Decoded([row for row, _ in chosen], [score for _, score in chosen])


def _best(
    scores: Float[Tensor, "R V"], sums: Float[Tensor, "R"], made: Int[Tensor, "R T"], eos: int, beams: int,
    finished: list[list], wanted: int | float,
) -> tuple[list[int], list[int], list[float]]:  # fmt: skip
    """Source row, token and score of the `beams` best continuations of each prompt; those that end are put in
    `finished`, unless it is full."""
    top = scores.topk(min(beams + 1, scores.shape[1]))
    totals = (sums[:, None] + top.values).nan_to_num(nan=-torch.inf).tolist()
    followers, width = top.indices.tolist(), len(scores) // len(finished)
    rows, tokens, kept = [], [], []
    for group, ended in enumerate(finished):
        own = range(group * width, (group + 1) * width)
        pairs = [(totals[row][i], row, token) for row in own for i, token in enumerate(followers[row])]
        going = []
        for total, row, token in sorted(pairs, key=lambda pair: -pair[0]):
            if token != eos:
                going.append((total, row, token))
            elif len(ended) < wanted:
                ended.append((made[row].tolist(), total))
            if len(going) == beams:
                break
        # a vocabulary smaller than the beam leaves places, which no continuation of theirs can win
        going += [(-torch.inf, *(going or pairs)[-1][1:])] * (beams - len(going))
        for column, values in zip((kept, rows, tokens), zip(*going, strict=True), strict=True):
            column.extend(values)
    return rows, tokens, kept


def _keep(cache: Cache, rows: Int[Tensor, "R"], before: int) -> None:
    """Cache rows as the beams now are. Beams of one prompt share its source, which therefore stays in place."""
    if len(rows) != before:
        cache.reorder(rows)
    elif not rows.equal(torch.arange(before, device=rows.device)):
        for layer in cache.self_attention:
            layer.reorder(rows)


def _settled(
    ended: list[tuple[list[int], float]], going: float, wanted: int | float, max_new: int, alpha: float | None
) -> bool:
    """Whether a prompt is done: its places are full, or no going sequence can overtake those that ended."""
    if not math.isinf(wanted):
        return len(ended) >= wanted
    # log-probabilities only fall, and the longest sequence is divided by the most
    return bool(ended) and max(map(partial(_score, alpha=alpha), ended)) >= going / _norm(max_new, alpha)


def _ranked(
    ended: list[tuple[list[int], float]], rows: list[list[int]], scores: list[float], beams: int, alpha: float | None
) -> tuple[list[int], float]:
    """The best of the ended sequences, filled up to `beams` with the best of the others."""
    others = sorted(zip(rows, scores, strict=True), key=lambda pair: -pair[1])
    pool = ended + others[: max(beams - len(ended), 0)]
    return best(Decoded(*map(list, zip(*pool, strict=True))), alpha)


def best(found: Decoded, length_penalty: float | None = None) -> tuple[list[int], float]:
    """The row with the best score (see `beam`), of rows that answer one prompt."""
    return max(zip(*found, strict=True), key=partial(_score, alpha=length_penalty))


def _score(row: tuple[list[int], float], alpha: float | None) -> float:
    return row[1] / _norm(len(row[0]), alpha)


def _norm(length: int, alpha: float | None) -> float:
    return float(max(length, 1)) if alpha is None else ((5 + length) / 6) ** alpha
