"""Decoding of transducers: greedy, and a beam search over frames that sums the alignments of a text (Graves 2012)."""

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.decoding.lm_fusion import Added, Fuse
from multimodal.models.speech.transducer import State, Transducer

AHEAD = 8  # frames


class TransducerPath(NamedTuple):
    """Tokens, the frames [start, end) and probability of each, and the log-probability of the path (greedy) or of the
    text (beam)."""

    ids: list[int]
    spans: list[tuple[int, int]]
    probabilities: list[float]
    logprob: float


@torch.inference_mode()
def transducer_greedy(model: Transducer, frames: Float[Tensor, "T J"]) -> TransducerPath:
    """The likeliest output at each step. An RNN-T goes to the next frame after a blank or `most_symbols` tokens; a TDT
    by the likeliest duration, and by one frame after a blank of duration 0 (Xu et al. 2023, algorithm 1)."""
    config, path = model.config, TransducerPath([], [], [], 0.0)
    text, state = model.predict(_ids(config.blank, frames))
    at = symbols = start = 0
    total, ahead = 0.0, None
    while at < len(frames):
        if ahead is None or at >= start + len(ahead[0]):  # one product for frames that may all be blank
            ahead, start = model.logprobs(frames[at : at + AHEAD], text[0]), at
        tokens, durations = (part[at - start] for part in ahead)
        token = int(tokens.argmax())
        total += float(tokens[token])
        step = int(token == config.blank)
        if config.durations:
            best = int(durations.argmax())
            total += float(durations[best])
            step = max(config.durations[best], step)
        if token == config.blank:
            at, symbols = at + step, 0
            continue
        path.ids.append(token)
        path.spans.append((at, min(at + max(step, 1), len(frames))))
        path.probabilities.append(float(tokens[token].exp()))
        (text, state), ahead = model.predict(_ids(token, frames), state), None
        symbols = symbols + 1 if step == 0 else 0
        if symbols >= config.most_symbols:
            step, symbols = 1, 0
        at += step
    return path._replace(logprob=total)


Ids = tuple[int, ...]


class _Text(NamedTuple):
    """A hypothesis at a frame: log-probability of its alignments so far, the frames and probability of each token in
    the best of them (`top`), and what `fuse` adds to the score."""

    ids: Ids
    logprob: float
    top: float
    spans: tuple[tuple[int, int], ...] = ()
    probabilities: tuple[float, ...] = ()
    added: float = 0.0

    @property
    def score(self) -> float:
        return self.logprob + self.added


@torch.inference_mode()
def transducer_beam(
    model: Transducer, frames: Float[Tensor, "T J"], size: int, fuse: Fuse | None = None, end: int | None = None
) -> TransducerPath:  # fmt: skip
    """The best text of a beam of `size` at each frame, whose alignments are summed. `end`: token by which `fuse` scores
    the end of a text, and with it the last word. `most_symbols` tokens may be added to the longest text of a frame. A
    blank of duration 0 has no place in an alignment (Xu et al. 2023, section 3)."""
    predicted, added = _Predictions(model, frames), Added(fuse)
    waiting: list[dict[Ids, _Text]] = [{} for _ in range(len(frames) + 1)]
    waiting[0][()] = _Text((), 0.0, 0.0)
    for at in range(len(frames)):
        here, waiting[at] = waiting[at], {}
        longest, left = max(map(len, here), default=0) + model.config.most_symbols, []
        while here:
            # as many texts that left this frame are better: what still comes of these is no more likely
            bound = heapq.nlargest(size, left)[-1] if len(left) >= size else -math.inf
            here = _best({ids: one for ids, one in here.items() if one.score > bound}, size)
            if not here:
                break
            level = min(map(len, here))  # a shorter text may still become a longer one
            texts = [here.pop(ids) for ids in [ids for ids in here if len(ids) == level]]
            for one, outputs in zip(texts, predicted.outputs(frames[at], texts, size), strict=True):
                for token, step, score, logprob in outputs:
                    if step == 0 and level == longest:
                        continue
                    target = min(at + step, len(frames))
                    made = one._replace(logprob=one.logprob + score, top=one.top + score)
                    if token != model.config.blank:
                        made = _grown(made, token, (at, max(target, at + 1)), math.exp(logprob), added)
                    _add(waiting[target] if step else here, made)
                    if step:
                        left.append(made.score)
    ended = lambda one: one.score + (0.0 if end is None else added(one.ids, end))
    best = max(waiting[-1].values(), key=ended)
    return TransducerPath(list(best.ids), list(best.spans), list(best.probabilities), best.logprob)


class _Predictions:
    """The prediction network's outputs by text, each computed once from that of the text before its last token."""

    def __init__(self, model: Transducer, frames: Float[Tensor, "T J"]):
        self.model, self.device = model, frames.device
        self.known: dict[Ids, tuple[Tensor, State]] = {(): self._step([model.config.blank], None)[0]}

    def _step(self, ids: list[int], state: State | None) -> list[tuple[Tensor, State]]:
        rows = torch.tensor(ids, device=self.device)[:, None]
        made, (hidden, cell) = self.model.predict(rows, state)
        return [(made[i, 0], (hidden[:, i : i + 1], cell[:, i : i + 1])) for i in range(len(ids))]

    def outputs(
        self, frame: Float[Tensor, "J"], texts: list[_Text], size: int
    ) -> list[list[tuple[int, int, float, float]]]:  # fmt: skip
        """(token, frames, log-probability, of the token alone) of the blank and the `size` best tokens, with each
        duration, for each text."""
        new = [one.ids for one in texts if one.ids not in self.known]
        if new:
            states = [self.known[ids[:-1]][1] for ids in new]
            state = torch.cat([own[0] for own in states], 1), torch.cat([own[1] for own in states], 1)
            self.known |= dict(zip(new, self._step([ids[-1] for ids in new], state), strict=True))
        made = torch.stack([self.known[one.ids][0] for one in texts])
        tokens, durations = self.model.logprobs(frame[None], made)
        blank = self.model.config.blank
        values, indices = tokens[:, :blank].topk(min(size, blank))
        rows = zip(tokens[:, blank].tolist(), indices.tolist(), values.tolist(), durations.tolist(), strict=True)
        return [list(self._steps([(blank, none), *zip(best, own, strict=True)], spans))
                for none, best, own, spans in rows]  # fmt: skip

    def _steps(
        self, outputs: list[tuple[int, float]], durations: list[float]
    ) -> Iterator[tuple[int, int, float, float]]:  # fmt: skip
        config = self.model.config
        for token, logprob in outputs:
            if not config.durations:
                yield token, int(token == config.blank), logprob, logprob
            for step, own in zip(config.durations, durations, strict=True):
                if step or token != config.blank:
                    yield token, step, logprob + own, logprob


def _grown(one: _Text, token: int, span: tuple[int, int], probability: float, added: Added) -> _Text:
    return one._replace(
        ids=(*one.ids, token), spans=(*one.spans, span), probabilities=(*one.probabilities, probability),
        added=one.added + added(one.ids, token),
    )  # fmt: skip


def _add(texts: dict[Ids, _Text], one: _Text) -> None:
    """Sum the alignments of a text, and keep the frames of the best."""
    other = texts.get(one.ids)
    if other is None:
        texts[one.ids] = one
        return
    best = max(one, other, key=lambda text: text.top)
    texts[one.ids] = best._replace(logprob=float(np.logaddexp(one.logprob, other.logprob)))


def _best(texts: dict[Ids, _Text], size: int) -> dict[Ids, _Text]:
    if len(texts) <= size:
        return texts
    return {one.ids: one for one in heapq.nlargest(size, texts.values(), key=lambda one: one.score)}


def _ids(token: int, frames: Tensor) -> Int[Tensor, "1 1"]:
    return torch.tensor([[token]], device=frames.device)


@torch.inference_mode()
def no_text_probability(model: Transducer, frames: Float[Tensor, "T J"]) -> float:
    """Probability of an empty text: of blanks alone."""
    config, count = model.config, len(frames)
    text, _ = model.predict(_ids(config.blank, frames))
    tokens, durations = model.logprobs(frames, text[0])
    blank = tokens[:, config.blank]
    if not config.durations:
        return float(blank.sum().exp())
    reached = torch.full((count + 1,), -torch.inf, dtype=torch.float32, device=frames.device)
    reached[0] = 0.0
    for at in range(count):
        for number, step in enumerate(config.durations):
            if step:
                target = min(at + step, count)
                reached[target] = torch.logaddexp(reached[target], reached[at] + blank[at] + durations[at, number])
    return float(reached[count].exp())
