"""The device's side of a beam search: which rows continue with which tokens. It does not depend on what has ended, so
that the host may follow some steps behind."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.captured import SearchState, Start, replayable
from multimodal.decoding.logits import Replayed
from multimodal.decoding.sampling import (
    PIECE,
    LogitsProcessor,
    Step,
    StopRule,
    is_end,
    next_logits,
    rows_of,
    without_padding,
)

STOPPED = 2  # by a rule, without an end token


class BeamChoice(NamedTuple):
    """The beams of each prompt: the rows that they continue, their tokens and sums, and a note for the host of all
    continuations, best first: totals, tokens, sources within the prompt, whether they end (1, or `STOPPED`), and which
    of them are the beams."""

    rows: Int[Tensor, "Q"]
    tokens: Int[Tensor, "Q"]
    sums: Float[Tensor, "Q"]
    note: Float[Tensor, "B N"]


def read_note(note: list[float], beams: int) -> tuple[Sequence[float], ...]:
    """The parts of a prompt's note."""
    size = (len(note) - beams) // 4
    return *(note[i * size : (i + 1) * size] for i in range(4)), [int(at) for at in note[4 * size :]]


def choose(
    scores: Float[Tensor, "R V"], sums: Float[Tensor, "R"], ends: tuple[int, ...], beams: int, count: int,
    stops: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> BeamChoice:  # fmt: skip
    """Choose the `beams` best continuations of each of `count` prompts, of the best (1 + ends)·`beams` as transformers.
    `stops`: (rows, their new tokens) -> those that end so."""
    most = (1 + len(ends)) * beams  # of which the beams do not end, unless a rule stops them
    values, indices = _top(scores, min(beams + len(ends) if stops is None else most, scores.shape[1]))
    each, width = values.shape[1], len(scores) // count
    totals = (sums[:, None] + values).nan_to_num(nan=-torch.inf).reshape(count, -1)
    missing = max(most - totals.shape[1], 0)  # in the first step, and of a tiny vocabulary
    totals, order = F.pad(totals, (0, missing), value=-torch.inf).sort(dim=1, descending=True, stable=True)
    totals, order = totals[:, :most], order[:, :most]
    tokens = F.pad(indices.reshape(count, -1), (0, missing), value=ends[0]).gather(1, order)
    sources, ended = (order // each).clamp(max=width - 1), is_end(tokens, ends).int()
    firsts = torch.arange(count, device=scores.device)[:, None] * width
    if stops is not None:
        stopped = stops((sources + firsts).flatten(), tokens.flatten().clamp(min=0)).view_as(ended)
        ended = ended.where((ended > 0) | ~stopped, STOPPED)
    beam = ended.bool().int().sort(dim=1, stable=True).indices[:, :beams]  # the continuing ones, best first
    note = torch.cat([x.double() for x in (totals, tokens, sources, ended, beam)], 1)
    kept = totals.gather(1, beam).masked_fill(ended.gather(1, beam) > 0, -torch.inf)
    rows, new = (sources + firsts).gather(1, beam), tokens.gather(1, beam).clamp(min=0)
    return BeamChoice(rows.flatten(), new.flatten(), kept.flatten(), note)


def _top(scores: Float[Tensor, "R V"], count: int) -> tuple[Float[Tensor, "R C"], Int[Tensor, "R C"]]:
    """`topk`, faster on a CPU, which sorts whole rows: search only the pieces with the highest peaks."""
    pieces = scores.shape[1] // PIECE
    if pieces < 2 * count or scores.device.type != "cpu":
        return scores.topk(count)
    peaks = scores[:, : pieces * PIECE].unflatten(1, (pieces, PIECE)).amax(2)
    firsts = peaks.topk(count, sorted=False).indices * PIECE
    inside, last = torch.arange(PIECE, device=scores.device), scores.shape[1] % PIECE
    rest = (inside[:last] + pieces * PIECE).expand(len(scores), -1)
    places = torch.cat([(firsts[:, :, None] + inside).flatten(1), rest], 1)
    values, order = scores.gather(1, places).topk(count)
    return values, places.gather(1, order)


class Beams:
    """The beams of B prompts, one step after the other. `processors` make scores of logits."""

    shrinks = True

    def __init__(
        self, step: Step, prompt: Int[Tensor, "B T"], cache: Cache, ends: tuple[int, ...], beams: int,
        processors: Sequence[LogitsProcessor], stops: StopRule | None = None,
    ):  # fmt: skip
        self.step, self.cache, self.ends, self.beams, self.processors = step, cache, ends, beams, processors
        self.stops = stops
        self.prompts, self.ids, self.new = len(prompt), prompt, prompt
        self.sums = torch.zeros(len(prompt), dtype=torch.float32, device=prompt.device)
        self.followers = [one for one in processors if hasattr(one, "reorder_rows")]

    def next(self) -> Float[Tensor, "B N"]:
        """Make the next token of each beam, and return the note of the `BeamChoice`."""
        scores = next_logits(self.step, self.new, self.cache, self.ids, self.processors)
        rows, tokens, self.sums, note = choose(
            scores, self.sums, self.ends, self.beams, self.prompts, self._stopped if self.stops else None
        )
        if rows.device.type != "cpu" or rows.tolist() != list(range(len(self.ids))):
            self.cache.reorder_rows(rows)
        for one in self.followers:
            one.reorder_rows(rows)
        self.ids, self.new = torch.cat([self.ids[rows], tokens[:, None]], 1), tokens[:, None]
        return note

    def _stopped(self, rows: Int[Tensor, "N"], tokens: Int[Tensor, "N"]) -> Bool[Tensor, "N"]:
        seen = without_padding(self.ids, self.cache)
        return self.stops(torch.cat([seen[rows], tokens[:, None]], 1))

    def keep(self, prompts: list[int]) -> None:
        """Continue with these prompts alone."""
        rows = rows_of(prompts, self.beams, self.ids.device)
        self.ids, self.new, self.sums, self.prompts = self.ids[rows], self.new[rows], self.sums[rows], len(prompts)
        self.cache.reorder_rows(rows)
        self.cache.reorder_sources(rows_of(prompts, 1, self.ids.device))


class BeamRules(NamedTuple):
    """The tokens that end a beam, the number of beams and processors that can be replayed."""

    ends: tuple[int, ...]
    width: int
    processors: tuple[Replayed, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return "beams", self.ends, self.width, tuple(one.key for one in self.processors)

    def state(self, rows: int, capacity: int, vocabulary: int, device: torch.device) -> "BeamState":
        return BeamState(self, rows, capacity, device)


class BeamState(SearchState):
    """The newest note of R rows, those of unused prompts included."""

    def __init__(self, rules: BeamRules, rows: int, capacity: int, device: torch.device):
        super().__init__(rules.processors, rows, capacity, device)
        self.rules, self.prompts = rules, rows // rules.width
        size = 4 * rules.width * (1 + len(rules.ends)) + rules.width
        self.note = torch.zeros(self.prompts, size, dtype=torch.float64, device=device)

    def put(self, choice: BeamChoice, at: Int[Tensor, "1"]) -> None:
        """Continue with a choice at position `at`, whose rows have moved already."""
        count = len(choice.tokens)
        self.sums[:count] = choice.sums
        self.note[: len(choice.note)] = choice.note
        self.token[:count] = choice.tokens
        self.ids[:count].index_copy_(1, at, choice.tokens[:, None])

    def take(self, cache: Cache, logits: Float[Tensor, "R V"], at: Int[Tensor, "1"]) -> None:
        choice = choose(logits, self.sums, self.rules.ends, self.rules.width, self.prompts)
        cache.reorder_rows(choice.rows)
        self.ids.copy_(self.ids.index_select(0, choice.rows))
        self.put(choice, at)


class CapturedBeams:
    """`Beams` inside of a CUDA graph. All prompts stay to the end. A note is valid until the next step."""

    shrinks = False

    def __init__(self, start: Start, step: Step, prompt: Int[Tensor, "B T"], cache: Any, rules: BeamRules):
        self.start, self.step, self.prompt, self.cache, self.rules = start, step, prompt, cache, rules
        self.state: BeamState | None = None

    def next(self) -> Float[Tensor, "B N"]:
        if self.state is None:
            self._begin()
        else:
            self.advance()
        return self.state.note[: len(self.prompt)]

    def _begin(self) -> None:
        prompt, ends, beams = self.prompt, self.rules.ends, self.rules.width
        scores = next_logits(self.step, prompt, self.cache, prompt, self.rules.processors)
        choice = choose(scores, scores.new_zeros(len(prompt)), ends, beams, len(prompt))
        self.cache.reorder_rows(choice.rows)
        self.state, self.advance = self.start(self.rules, len(choice.rows), scores.shape[1])
        self.state.begin(prompt[choice.rows], self.cache.start)
        self.state.put(choice, self.state.first)


def beams_of(
    step: Step, prompt: Int[Tensor, "B T"], cache: Cache, ends: tuple[int, ...], beams: int,
    processors: Sequence[LogitsProcessor], stops: StopRule | None = None,
) -> Beams | CapturedBeams:  # fmt: skip
    """The device's side of a search, inside of a CUDA graph where the cache offers one and all can be replayed."""
    if cache.start_search and stops is None and (replayed := replayable(processors, prompt)) is not None:
        return CapturedBeams(cache.start_search, step, prompt, cache, BeamRules(ends, beams, replayed))
    return Beams(step, prompt, cache, ends, beams, processors, stops)
