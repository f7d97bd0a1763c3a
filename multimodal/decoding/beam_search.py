"""Beam search over any next-token function (see `sampling`), with openai-whisper's or transformers' stopping rule."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.beams import STOPPED, beams_of, read_note
from multimodal.decoding.logits import log_softmax
from multimodal.decoding.sampling import Ends, LogitsProcessor, SampledTokens, Step, StopRule, ends_of, length_limits

LengthNorm = Callable[[int], float]  # number of new tokens without the end -> divisor of their log-probability
Row = tuple[list[int], float]  # new ids without the end, and the sum of their scores, the end included
EarlyStopping = bool | str  # or "never"
ASYNC_DEVICES = ("cuda",)  # device types on which the host follows some steps behind
STEPS_AHEAD = 2  # steps, so that the device never waits for the host


@dataclass
class _Prompt:
    """One prompt of a beam search: at most `limit` new tokens, the `ended` sequences with their normalized scores, and
    once the search is done the `chosen` ones, best first."""

    limit: int
    ended: list[tuple[float, Row]] = field(default_factory=list)
    chosen: list[Row] | None = None
    rows: list[list[int]] = field(default_factory=lambda: [[]])  # of the active beams


@torch.inference_mode()
def beam_search(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, *, eos: Ends, max_new: int | Sequence[int], beams: int,
    processors: Sequence[LogitsProcessor] = (), length_penalty: float | LengthNorm | None = None, patience: float = 1.0,
    scorer: LogitsProcessor | None = None, keep: int = 1, early_stopping: EarlyStopping | None = None,
    stops: StopRule | None = None, interrupt: Callable[[], None] | None = None,
) -> SampledTokens:  # fmt: skip
    """Beam search as in openai-whisper: a prompt is done when `beams`·`patience` sequences have ended (Kasai et al.
    2022) or at its `max_new`, and its best sequence is returned. With infinite `patience` it continues until no active
    beam can still win, since a confident model fills the list with poor endings first. That is transformers'
    `early_stopping="never"`, except that sequences cut at `max_new` are returned only where too few have ended.

    With `early_stopping` it is that of transformers 5, without `patience`: only endings among the `beams` best
    continuations count, the `beams` best of them are kept, sequences cut at `max_new` are ranked among them, and
    processors change log-probabilities that are not normalized again. True: done with `beams` endings; False: when the
    best active beam, normalized at its length, is no better than the worst of these; "never": when it is no better at
    any length up to `max_new`.

    `length_penalty`: None ranks by mean log-probability, α by sum / ((5 + length) / 6)^α (Wu et al. 2016), so 0 by the
    sum; a monotonic function of the length is the divisor itself (`per_token` is transformers'). `scorer` turns (ids,
    log-probabilities) into scores to sum, as for joint CTC decoding; all prompts then stay in the batch to the end.
    The `keep` ≤ `beams` best of each prompt are returned together, best first; a missing one has no ids and -inf.
    `stops`: see `sampling.greedy`; the last token of a sequence that it ends counts like an end token.
    `interrupt` is called before each step; what it raises ends the search.

    On `ASYNC_DEVICES` the host reads each step's note (see `beams`) while the next `STEPS_AHEAD` steps run, so a batch
    runs that many steps longer."""
    stop = _stop(beams, patience, keep, length_penalty, early_stopping)
    every = [*processors, log_softmax] if early_stopping is None else [log_softmax, *processors]
    ends, none = ends_of(eos), [([], 0.0)] * keep
    prompts = [_Prompt(limit, chosen=None if limit > 0 else none) for limit in length_limits(max_new, prompt, cache)]
    delay = STEPS_AHEAD if prompt.device.type in ASYNC_DEVICES else 0
    search = beams_of(step, prompt, cache, ends, beams, every if scorer is None else [*every, scorer], stops)
    shrinks, active, last = search.shrinks and scorer is None, prompts, max(one.limit for one in prompts)
    notes = deque[_Note]()
    for count in range(1, last + 1):
        if interrupt is not None:
            interrupt()
        notes.append(_Note(search.next(), active, count))
        while len(notes) > (delay if count < last else 0):
            notes.popleft().read(stop, keep)
        going = [at for at, one in enumerate(active) if one.chosen is None]
        if not going:
            break
        if shrinks and 2 * len(going) <= len(active):
            active = [active[at] for at in going]
            search.keep(going)
    chosen = [row for one in prompts for row in (one.chosen + [([], -math.inf)] * keep)[:keep]]
    return SampledTokens([row for row, _ in chosen], [score for _, score in chosen])


class _Note:
    """The device's choice in step `count`, on its way to the host."""

    def __init__(self, note: Float[Tensor, "B N"], active: list[_Prompt], count: int):
        self.note, self.active, self.count, self.event = note, active, count, None
        if note.is_cuda:
            self.note = torch.empty(note.shape, dtype=note.dtype, pin_memory=True).copy_(note, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self, stop: "_Patience | _Transformers", keep: int) -> None:
        if self.event is not None:
            self.event.synchronize()
        for one, row in zip(self.active, self.note.tolist(), strict=True):
            if one.chosen is None:
                _follow(one, row, self.count, stop, keep)


def _follow(one: _Prompt, row: list[float], count: int, stop: "_Patience | _Transformers", keep: int) -> None:
    totals, tokens, sources, ended, beam = read_note(row, stop.beams)
    for rank in range(max(beam) + 1):
        if ended[rank] and totals[rank] > -math.inf and stop.takes(one, rank):
            ids = [*one.rows[int(sources[rank])], *([int(tokens[rank])] if ended[rank] == STOPPED else [])]
            one.ended.append((totals[rank] / _norm(count - 1, stop.alpha), (ids, totals[rank])))
    kept = [-math.inf if ended[at] else totals[at] for at in beam]
    one.rows = [[*one.rows[int(sources[at])], int(tokens[at])] for at in beam]
    if count >= one.limit or stop.settled(one, max(kept), count):
        one.chosen = stop.ranked(one, one.rows, kept)[:keep]


class _Patience:
    """Stop when enough sequences of a prompt have ended."""

    def __init__(self, beams: int, count: int | float, keep: int, alpha: float | LengthNorm | None):
        self.beams, self.count, self.keep, self.alpha = beams, count, keep, alpha

    def takes(self, one: _Prompt, rank: int) -> bool:
        """Return True if a sequence that ends now counts; `rank`: number of better continuations."""
        return len(one.ended) < self.count

    def settled(self, one: _Prompt, going: float, count: int) -> bool:
        """Return True if enough have ended, or no active beam can overtake the `keep` best that ended. `going`: best
        score of the active beams after `count` tokens."""
        if not math.isinf(self.count):
            return len(one.ended) >= self.count
        if len(one.ended) < self.keep:
            return False
        last = heapq.nlargest(self.keep, (score for score, _ in one.ended))[-1]
        # log-probabilities only fall, and the longest or the shortest sequence to come is divided by the most
        return last >= going / max(_norm(count, self.alpha), _norm(one.limit, self.alpha))

    def ranked(self, one: _Prompt, rows: list[list[int]], scores: list[float]) -> list[Row]:
        """The ended sequences and the others, best first: the others follow with infinite patience; else
        as many as fill the beams are ranked among them."""
        apart = math.isinf(self.count)
        others = sorted(zip(rows, scores, strict=True), key=lambda pair: -pair[1])
        cut = [] if apart else others[: max(len(rows) - len(one.ended), 0)]
        pool = one.ended + [(_score(row, self.alpha), row) for row in cut]
        ranked = [row for _, row in sorted(pool, key=_best)] + (others if apart else [])
        return [row for row in ranked if row[1] > -math.inf] or ranked[:1]


class _Transformers:
    """Stop as `GenerationMixin._beam_search` of transformers 5."""

    def __init__(self, beams: int, early_stopping: EarlyStopping, alpha: float | LengthNorm | None):
        self.beams, self.early_stopping, self.alpha = beams, early_stopping, alpha

    def takes(self, one: _Prompt, rank: int) -> bool:
        return rank < self.beams

    def settled(self, one: _Prompt, going: float, count: int) -> bool:
        one.ended = sorted(one.ended, key=_best)[: self.beams]
        if len(one.ended) < self.beams or self.early_stopping is True:
            return len(one.ended) == self.beams
        bound = _norm(count - 1, self.alpha)
        if self.early_stopping == "never":
            bound = max(bound, _norm(one.limit - 1, self.alpha))
        return going / bound <= one.ended[-1][0]

    def ranked(self, one: _Prompt, rows: list[list[int]], scores: list[float]) -> list[Row]:
        pool = list(one.ended)
        if rows and len(rows[0]) == one.limit:  # without an end in their length
            cut = _norm(one.limit - 1, self.alpha)
            pool += [(score / cut, (ids, score)) for ids, score in zip(rows, scores, strict=True)]
        return [row for score, row in sorted(pool, key=_best) if score > -math.inf]


def _best(scored: tuple[float, Row]) -> float:
    """Key that sorts the best score first."""
    return -scored[0]


def _stop(
    beams: int, patience: float, keep: int, alpha: float | LengthNorm | None, early_stopping: EarlyStopping | None
) -> _Patience | _Transformers:
    count = beams * patience if math.isinf(patience) else round(beams * patience)
    if beams < 1 or count < 1 or not 1 <= keep <= beams:
        raise ValueError(f"beams must be at least 1 and at least keep (got {beams}, keep {keep}, patience {patience})")
    if early_stopping is None:
        return _Patience(beams, count, keep, alpha)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never' (got {early_stopping!r})")
    return _Transformers(beams, early_stopping, alpha)


def best_row(rows: SampledTokens, length_penalty: float | None = None) -> Row:
    """The row with the best score, of rows for one prompt."""
    return max(zip(*rows, strict=True), key=partial(_score, alpha=length_penalty))


def per_token(alpha: float) -> LengthNorm:
    """tokens^α with the end counted, as transformers' `length_penalty`: 1 ranks by the mean, 0 by the sum."""
    return lambda length: float(length + 1) ** alpha


def _score(row: Row, alpha: float | LengthNorm | None) -> float:
    return row[1] / _norm(len(row[0]), alpha)


def _norm(length: int, alpha: float | LengthNorm | None) -> float:
    if callable(alpha):
        return alpha(length)
    return float(max(length, 1)) if alpha is None else ((5 + length) / 6) ** alpha
