"""Logits processors: Whisper's (Radford et al. 2022, section 4.5), and transformers' for captions and texts.

They write in place and ignore `sampling.PADDING` before a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.decoding.sampling import PADDING, LogitsProcessor


class History(NamedTuple):
    """Ids [R S] at their positions, of which `at` [1] is the newest and `first` [1] the first after the prompt: of
    fixed size, as a CUDA graph needs them."""

    ids: Int[Tensor, "R S"]
    at: Int[Tensor, "1"]
    first: Int[Tensor, "1"]

    def until_now(self) -> Int[Tensor, "R S"]:
        """The ids, with `PADDING` after the newest."""
        return self.ids.masked_fill(torch.arange(self.ids.shape[1], device=self.ids.device) > self.at, PADDING)

    def made(self) -> Bool[Tensor, "R S"]:
        """Which of them are after the prompt."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return ((places >= self.first) & (places <= self.at)).expand(self.ids.shape)


@dataclass(frozen=True, eq=False)
class Replayed:
    """A processor with a form that a CUDA graph can replay, after the first token. `key`: equal for equal processors;
    `start`: the number of ids in the prompt that it was made for, if that matters."""

    processor: LogitsProcessor
    replayed: Callable[[History, Float[Tensor, "R V"]], Float[Tensor, "R V"]]
    key: tuple[Any, ...]
    start: int | None = None

    def __call__(self, ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return self.processor(ids, logits)


def suppress(tokens: Sequence[int]) -> Replayed:
    """Forbid these tokens."""
    index = torch.tensor(sorted(set(tokens)), dtype=torch.long, device="cpu")

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        nonlocal index
        index = index.to(logits.device)
        return logits.index_fill_(-1, index, -torch.inf)

    replayed = lambda history, logits: logits.index_fill_(-1, index, -torch.inf)  # on the device since the first token
    return Replayed(processor, replayed, ("suppress", *index.tolist()))


def suppress_first(tokens: Sequence[int], start: int, count: int = 1) -> Replayed:
    """Forbid these tokens among the first `count` after a prompt of `start` ids: a blank, or an early end."""
    never = suppress(tokens)

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return never(ids, logits) if ids.shape[1] - start < count else logits

    def replayed(history: History, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        if count == 1:
            return logits
        early = history.at - history.first + 1 < count
        return torch.where(early, never.replayed(history, logits.clone()), logits)

    return Replayed(processor, replayed, ("suppress_first", count, never.key), start)


def no_repeat_ngram(size: int) -> Replayed:
    """Forbid n-grams of `size` tokens that the row or its prompt already has (Paulus et al. 2017)."""

    def without(
        logits: Float[Tensor, "B V"], ngrams: Int[Tensor, "B n S"], newest: Int[Tensor, "B S-1"],
        real: Bool[Tensor, "B n"],
    ) -> Float[Tensor, "B V"]:  # fmt: skip
        same = (ngrams[..., :-1] == newest[:, None]).all(-1) & real
        lasts = ngrams[..., -1].clamp(min=0)  # padding matches nothing
        return logits.scatter_add_(1, lasts, torch.where(same, -torch.inf, 0.0).to(logits.dtype))

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        count = ids.shape[1] - size + 1
        if count < 1:
            return logits
        return without(logits, ids.unfold(1, size, 1), ids[:, count:], ids[:, :count] != PADDING)

    def replayed(history: History, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        ids, at, _ = history
        if ids.shape[1] < size:
            return logits
        count = ids.shape[1] - size + 1
        first = at - size + 1  # of the n-grams that are complete
        newest = ids.index_select(1, (first + 1 + torch.arange(size - 1, device=ids.device)).clamp(min=0))
        real = (ids[:, :count] != PADDING) & (torch.arange(count, device=ids.device) <= first)
        return without(logits, ids.unfold(1, size, 1), newest, real)

    return Replayed(processor, replayed, ("no_repeat_ngram", size))


def no_ngram_of(source: Sequence[int], size: int) -> LogitsProcessor:
    """Forbid n-grams of `size` tokens that the `source` of all rows has (Roller et al. 2021, section 5.2)."""
    ngrams = torch.tensor(source, device="cpu").unfold(0, min(size, len(source)), 1)

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        nonlocal ngrams
        ngrams = ngrams.to(ids.device)
        if ngrams.shape[1] < size or ids.shape[1] < size - 1:
            return logits
        same = (ngrams[:, :-1] == ids[:, None, ids.shape[1] - size + 1 :]).all(-1)
        return logits.scatter_add_(
            1, ngrams[:, -1].expand(len(ids), -1), torch.where(same, -torch.inf, 0.0).to(logits.dtype)
        )

    return processor


def repetition_penalty(penalty: float) -> Replayed:
    """Divide positive logits of tokens in the row by `penalty` and multiply negative ones (Keskar et al. 2019, CTRL,
    section 4.1)."""

    def penalized(
        logits: Float[Tensor, "B V"], ids: Int[Tensor, "B T"], newest: Int[Tensor, "B 1"]
    ) -> Float[Tensor, "B V"]:
        ids = torch.where(ids == PADDING, newest, ids)
        own = logits.gather(1, ids)
        return logits.scatter_(1, ids, torch.where(own < 0, own * penalty, own / penalty))

    def replayed(history: History, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        return penalized(logits, history.until_now(), history.ids.index_select(1, history.at))

    return Replayed(lambda ids, logits: penalized(logits, ids, ids[:, -1:]), replayed, ("repetition_penalty", penalty))


class Penalties(NamedTuple):
    """OpenAI's terms of a token's logit: less `presence` if it is in the answer so far, less `frequency` for each time
    that it is there, plus its `bias` by id."""

    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def processor(self, start: int) -> Replayed:
        """For a prompt of `start` ids."""

        def changed(
            logits: Float[Tensor, "B V"], ids: Int[Tensor, "B T"], own: Bool[Tensor, "B T"]
        ) -> Float[Tensor, "B V"]:
            counts = torch.zeros_like(logits).scatter_add_(1, ids.clamp(min=0), own.to(logits.dtype))
            logits -= self.frequency * counts + self.presence * (counts > 0)
            for token, value in self.bias:
                logits[:, token] += value
            return logits

        def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
            own = ids[:, start:]
            return changed(logits, own, torch.ones_like(own, dtype=torch.bool))

        def replayed(history: History, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
            return changed(logits, history.ids, history.made())

        return Replayed(processor, replayed, ("penalties", *self), start)


def force(tokens: Sequence[int], at: int) -> Replayed:
    """Force these tokens, with probability 1, from position `at` on: M2M100's language behind the prompt, BART's end at
    the longest length."""

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        if 0 <= (made := ids.shape[1] - at) < len(tokens):
            logits.fill_(-torch.inf)[:, tokens[made]] = 0.0
        return logits

    def replayed(history: History, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        for place, token in enumerate(tokens, at):
            forced = torch.full_like(logits, -torch.inf)
            forced[:, token] = 0.0
            logits = torch.where(history.at + 1 == place, forced, logits)
        return logits

    return Replayed(processor, replayed, ("force", at, *tokens))


# log-probabilities: transformers' beam search applies later processors to these
log_softmax = Replayed(
    lambda ids, logits: logits.log_softmax(-1), lambda history, logits: logits.log_softmax(-1), ("log_softmax",)
)


def end_if_all_forbidden(eos: int) -> Replayed:
    """Allow the end where the processors before forbid every token."""

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        logits[:, eos].masked_fill_(logits.amax(-1) == -torch.inf, 0.0)
        return logits

    return Replayed(processor, lambda history, logits: processor(history.ids, logits), ("end", eos))


def top_k(logits: Float[Tensor, "B V"], count: int) -> Float[Tensor, "B V"]:
    """Keep the `count` most probable tokens; others -inf (Fan et al. 2018)."""
    least = logits.topk(min(count, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Float[Tensor, "B V"], mass: float) -> Float[Tensor, "B V"]:
    """Keep the smallest set of most probable tokens with `mass` of the probability; others -inf (nucleus sampling,
    Holtzman et al. 2020)."""
    ordered, places = logits.sort()
    outside = ordered.softmax(-1).cumsum(-1) <= 1 - mass
    outside[:, -1] = False
    return logits.masked_fill(outside.scatter(1, places, outside), -torch.inf)


def min_p(logits: Float[Tensor, "B V"], share: float) -> Float[Tensor, "B V"]:
    """Keep tokens with at least this `share` of the highest probability; others -inf (Nguyen et al. 2024)."""
    chances = logits.softmax(-1)
    return logits.masked_fill(chances < share * chances.amax(-1, keepdim=True), -torch.inf)


@dataclass(frozen=True)
class SamplingFilter:
    """`top_k` (0: off), then `top_p`, then `min_p`: the `narrow` of `sampling.sample`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        logits = top_k(logits, self.top_k) if self.top_k else logits
        logits = top_p(logits, self.top_p) if self.top_p < 1 else logits
        return min_p(logits, self.min_p) if self.min_p else logits


def timestamps(begin: int, eot: int, no_timestamps: int, start: int, latest_first: int | None = 50) -> Replayed:
    """Timestamp tokens (from id `begin` on) come first, in pairs except before the end, and never decrease.

    A prompt has `start` ids. The first timestamp is at most `latest_first` steps of 0.02 s. Where all timestamps
    together are more probable than any text token, one must follow. As openai-whisper's ApplyTimestampRules."""

    def processor(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        made, text, times = ids[:, start:], logits[:, :begin], logits[:, begin:]
        logits[:, no_timestamps] = -torch.inf
        if not made.shape[1]:
            text.fill_(-torch.inf)
            if latest_first is not None:
                times[:, latest_first + 1 :] = -torch.inf
            return logits
        return paired(logits, *_pairs(made, begin, times.shape[1]))

    def paired(
        logits: Float[Tensor, "B V"], closing: Bool[Tensor, "B"], earliest: Int[Tensor, "B"], always: bool = False
    ) -> Float[Tensor, "B V"]:
        text, times = logits[:, :begin], logits[:, begin:]
        times.masked_fill_(torch.arange(times.shape[1], device=times.device) < earliest[:, None], -torch.inf)
        _forbid(logits[:, :eot], closing, always)
        _forbid(text, times.logsumexp(-1) > text.amax(-1), always)
        return logits

    def replayed(history: History, logits: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
        logits[:, no_timestamps] = -torch.inf
        return paired(logits, *_replayed_pairs(history, begin, logits.shape[1] - begin), always=True)

    return Replayed(processor, replayed, ("timestamps", begin, eot, no_timestamps), start)


def _replayed_pairs(history: History, begin: int, count: int) -> tuple[Bool[Tensor, "R"], Int[Tensor, "R"]]:
    """`_pairs` of the ids after the prompt."""
    ids, at, first = history
    is_time = (ids >= begin) & history.made()
    last = is_time.index_select(1, at)[:, 0]
    before = is_time.index_select(1, (at - 1).clamp(min=0))[:, 0] | (at == first)
    return _next_time(last, before, ids.masked_fill(~is_time, begin - 1).amax(-1) - begin, count)


def _pairs(made: Int[Tensor, "B N"], begin: int, count: int) -> tuple[Bool[Tensor, "B"], Int[Tensor, "B"]]:
    """Rows that need the second timestamp of a pair or the end, and the first of `count` timestamps allowed next."""
    is_time = made >= begin
    last = is_time[:, -1]
    before = is_time[:, -2] if made.shape[1] > 1 else torch.ones_like(last)
    return _next_time(last, before, made.masked_fill(~is_time, begin - 1).amax(-1) - begin, count)


def _next_time(
    last: Bool[Tensor, "B"], before: Bool[Tensor, "B"], latest: Int[Tensor, "B"], count: int
) -> tuple[Bool[Tensor, "B"], Int[Tensor, "B"]]:
    """`last`, `before`: the last two ids are timestamps; `latest`: the latest one, since they never decrease."""
    closing = last & ~before
    earliest = torch.where(closing, latest, latest + 1)
    return closing, earliest.masked_fill(last & before, count)


def _forbid(logits: Float[Tensor, "B W"], rows: Bool[Tensor, "B"], always: bool) -> None:
    """Forbid all tokens of these rows. `any` is cheap on a CPU but waits on an accelerator, and `always` forbids it."""
    if always or logits.device.type != "cpu" or rows.any():
        logits.masked_fill_(rows[:, None], -torch.inf)


def no_speech_probability(logits: Float[Tensor, "B V"], no_speech: int) -> Float[Tensor, "B"]:
    """The probability of the no-speech token, from the logits that follow <|startoftranscript|>."""
    return logits.float().softmax(-1)[:, no_speech]
