"""Rules for the next token, as `search` takes them: Whisper's (Radford et al. 2022, section 4.5) and those of
captions and texts, which equal transformers' logits processors.

They write into the logits they get. What stands before a row, `search.PADDING`, counts for none of them."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.decoding.sampling import PADDING, Rule


def suppress(tokens: Sequence[int]) -> Rule:
    """These tokens never."""
    index = torch.tensor(sorted(set(tokens)), dtype=torch.long)

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        nonlocal index
        index = index.to(logits.device)
        return logits.index_fill_(-1, index, -torch.inf)

    return rule


def suppress_first(tokens: Sequence[int], start: int) -> Rule:
    """These tokens not as the first after a prompt of `start` ids (a blank or an immediate end)."""
    never = suppress(tokens)

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return never(ids, logits) if ids.shape[1] == start else logits

    return rule


def at_least(count: int, eos: int, start: int) -> Rule:
    """No end before `count` new tokens after a prompt of `start` ids."""
    never = suppress([eos])

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return never(ids, logits) if ids.shape[1] - start < count else logits

    return rule


def no_repeat(size: int) -> Rule:
    """No `size` tokens that stand in this order in the row already, its prompt included (Paulus et al. 2017)."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        if ids.shape[1] < size:
            return logits
        held = ids.unfold(1, size, 1)  # B n size
        same = (held[..., :-1] == ids[:, None, ids.shape[1] - size + 1 :]).all(-1) & (held[..., 0] != PADDING)
        lasts = held[..., -1].clamp(min=0)  # that of padding alone is not the same as anything
        return logits.scatter_add_(1, lasts, torch.where(same, -torch.inf, 0.0).to(logits.dtype))

    return rule


def repetition_penalty(penalty: float) -> Rule:
    """Logits of tokens that stand in the row, divided by `penalty` where they are above 0 and multiplied below
    (Keskar et al. 2019, CTRL, section 4.1)."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        ids = torch.where(ids == PADDING, ids[:, -1:], ids)
        held = logits.gather(1, ids)
        return logits.scatter_(1, ids, torch.where(held < 0, held * penalty, held / penalty))

    return rule


def allowed(function: Callable[[list[int]], Sequence[int]]) -> Rule:
    """Only the tokens that `function(ids so far, the prompt among them)` names, as transformers'
    `prefix_allowed_tokens_fn`; with none, or only forbidden ones, see `or_end`."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        never = torch.ones_like(logits, dtype=torch.bool)
        for row, own in zip(never, ids.tolist(), strict=True):
            row[list(function([i for i in own if i != PADDING]))] = False
        return logits.masked_fill_(never, -torch.inf)

    return rule


def one_of(continuations: Sequence[Sequence[int]], eos: int, start: int) -> Rule:
    """Only these sequences, and then the end, after a prompt of `start` ids; a row that has left them ends."""
    after: dict[tuple[int, ...], set[int]] = {}
    for ids in continuations:
        for count, token in enumerate([*ids, eos]):
            after.setdefault(tuple(ids[:count]), set()).add(token)
    ways = {begun: torch.tensor(sorted(tokens)) for begun, tokens in after.items()}

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        never = torch.ones_like(logits, dtype=torch.bool)
        for row, own in zip(never, ids[:, start:].tolist(), strict=True):
            row[ways.get(tuple(own), eos)] = False
        return logits.masked_fill_(never, -torch.inf)

    return rule


def forced(tokens: Sequence[int], start: int) -> Rule:
    """These tokens, with probability 1, as the first after a prompt of `start` ids (M2M100's language)."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        made = ids.shape[1] - start
        return _sure(logits, tokens[made]) if 0 <= made < len(tokens) else logits

    return rule


def forced_end(count: int, eos: int, start: int) -> Rule:
    """The end, with probability 1, as new token number `count` after a prompt of `start` ids (BART)."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return _sure(logits, eos) if ids.shape[1] - start == count - 1 else logits

    return rule


def _sure(logits: Float[Tensor, "B V"], token: int) -> Float[Tensor, "B V"]:
    logits.fill_(-torch.inf)[:, token] = 0.0
    return logits


def normalised(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Log-probabilities, to which transformers' beam search applies the rules that come after."""
    return logits.log_softmax(-1)


def or_end(eos: int) -> Rule:
    """The end where the rules before have forbidden every token."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        logits[:, eos].masked_fill_(logits.amax(-1) == -torch.inf, 0.0)
        return logits

    return rule


def top_k(logits: Float[Tensor, "B V"], count: int) -> Float[Tensor, "B V"]:
    """The `count` most probable tokens, the others -inf (Fan et al. 2018)."""
    least = logits.topk(min(count, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Float[Tensor, "B V"], mass: float) -> Float[Tensor, "B V"]:
    """The smallest set of most probable tokens with `mass` of the probability, the others -inf: nucleus sampling
    (Holtzman et al. 2020)."""
    ordered, places = logits.sort()
    outside = ordered.softmax(-1).cumsum(-1) <= 1 - mass
    outside[:, -1] = False
    return logits.masked_fill(outside.scatter(1, places, outside), -torch.inf)


def min_p(logits: Float[Tensor, "B V"], share: float) -> Float[Tensor, "B V"]:
    """The tokens with at least this `share` of the most probable one's probability, the others -inf (Nguyen et al.
    2024)."""
    chances = logits.softmax(-1)
    return logits.masked_fill(chances < share * chances.amax(-1, keepdim=True), -torch.inf)


def narrowed(count: int, mass: float, share: float = 0.0) -> Callable[[Tensor], Tensor]:
    """All three, for `search.sample`: of the `count` most probable tokens (0: of all) those with `mass`, and of these
    those with `share` of the first."""

    def narrow(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        logits = top_k(logits, count) if count else logits
        logits = top_p(logits, mass) if mass < 1 else logits
        return min_p(logits, share) if share else logits

    return narrow


def timestamps(begin: int, eot: int, no_timestamps: int, start: int, latest_first: int | None = 50) -> Rule:
    """Time tokens (from id `begin` on) come first, in pairs except before the end, and never go back.

    A prompt has `start` ids. The first time is at most `latest_first` steps of 0.02 s. Where all times together
    are more probable than any text token, a time must follow. As openai-whisper's ApplyTimestampRules."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        made, text, times = ids[:, start:], logits[:, :begin], logits[:, begin:]
        logits[:, no_timestamps] = -torch.inf
        if not made.shape[1]:
            text.fill_(-torch.inf)
            if latest_first is not None:
                times[:, latest_first + 1 :] = -torch.inf
            return logits
        closing, earliest = _pairs(made, begin, times.shape[1])
        times.masked_fill_(torch.arange(times.shape[1], device=times.device) < earliest[:, None], -torch.inf)
        _forbid(logits[:, :eot], closing)
        _forbid(text, times.logsumexp(-1) > text.amax(-1))
        return logits

    return rule


def _pairs(made: Int[Tensor, "B N"], begin: int, count: int) -> tuple[Bool[Tensor, "B"], Int[Tensor, "B"]]:
    """Which rows wait for the second time of a pair or the end, and the first of `count` times that may follow."""
    is_time = made >= begin
    last = is_time[:, -1]
    before = is_time[:, -2] if made.shape[1] > 1 else torch.ones_like(last)
    closing = last & ~before
    latest = made.masked_fill(~is_time, begin - 1).amax(-1) - begin  # times do not go back, so the last is the largest
    earliest = torch.where(closing, latest, latest + 1)
    return closing, earliest.masked_fill(last & before, count)


def _forbid(logits: Float[Tensor, "B W"], rows: Bool[Tensor, "B"]) -> None:
    """All tokens of these rows. To ask whether there are any is cheap on a processor and a wait on an accelerator."""
    if logits.device.type != "cpu" or rows.any():
        logits.masked_fill_(rows[:, None], -torch.inf)


def no_speech_probability(logits: Float[Tensor, "B V"], no_speech: int) -> Float[Tensor, "B"]:
    """The probability of the no-speech token, from the logits that follow <|startoftranscript|>."""
    return logits.float().softmax(-1)[:, no_speech]
