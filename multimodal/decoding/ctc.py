"""Decoding of CTC outputs: best path (Graves et al. 2006, section 3.2), and prefix beams (Hannun et al. 2014)."""

import heapq
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.masks import padding
from multimodal.decoding.lm_fusion import Added, Fuse


def ctc_greedy(logits: Float[Tensor, "B T W"], lengths: Int[Tensor, "B"], blank: int) -> list[list[int]]:
    """Token ids of each row's best path: the winner of every frame, repeats merged and blanks removed.

    Ignores frames from `lengths` on. Scores may be logits or log-probabilities."""
    winners = logits.argmax(-1)
    kept = padding(lengths, winners.shape[1]) & (winners != blank)
    kept[:, 1:] &= winners[:, 1:] != winners[:, :-1]
    winners = torch.where(kept, winners, -1).cpu()  # the only wait for a GPU
    kept = winners >= 0
    return [row.tolist() for row in winners[kept].split(kept.sum(1).tolist())]


def ctc_beam(
    logprobs: Float[Tensor, "T W"], blank: int, size: int, fuse: Fuse | None = None, end: int | None = None
) -> tuple[list[int], float]:  # fmt: skip
    """The best text of a beam of `size` at each frame, whose alignments are summed, and its score. A frame adds one of
    its `size` likeliest tokens. `end`: token by which `fuse` scores the end of a text.

    Frame by frame: beams of equally long texts would favour those that have used up fewer frames."""
    added, tokens = Added(fuse), logprobs.float().clone()
    tokens[:, [blank] if end is None or end >= tokens.shape[1] else [blank, end]] = -math.inf
    values, best = (part.tolist() for part in tokens.topk(min(size, tokens.shape[1] - 1)))
    # of each text: log-probability of its alignments that end in a blank, and in its last token; what `fuse` adds
    beam: dict[tuple[int, ...], list[float]] = {(): [0.0, -math.inf, 0.0]}
    for frame, chances, ids in zip(logprobs.float().cpu().numpy(), values, best, strict=True):
        made: dict[tuple[int, ...], list[float]] = {}
        for text, (blanks, last, extra) in beam.items():
            whole, own = _sum(blanks, last), made.setdefault(text, [-math.inf, -math.inf, extra])
            own[0] = _sum(own[0], whole + float(frame[blank]))
            if text:
                own[1] = _sum(own[1], last + float(frame[text[-1]]))
            for token, chance in zip(ids, chances, strict=True):
                before = blanks if text[-1:] == (token,) else whole  # a repeat needs a blank between
                if before + chance > -math.inf:
                    if (other := made.get(grown := (*text, token))) is None:
                        other = made[grown] = [-math.inf, -math.inf, extra + added(text, token)]
                    other[1] = _sum(other[1], before + chance)
        beam = dict(heapq.nlargest(size, made.items(), key=lambda item: _score(item[1])))
    scores = {text: _score(own) + (0.0 if end is None else added(text, end)) for text, own in beam.items()}
    text = max(scores, key=scores.__getitem__)
    return list(text), scores[text]


def _score(own: list[float]) -> float:
    return _sum(own[0], own[1]) + own[2]


def _sum(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    low, high = (a, b) if a < b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))
