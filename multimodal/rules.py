"""Whisper's rules for the next token (Radford et al. 2022, section 4.5), as `search` takes them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.search import Rule


def suppress(tokens: Sequence[int]) -> Rule:
    """These tokens never."""
    index = torch.tensor(sorted(set(tokens)), dtype=torch.long)

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return logits.index_fill(-1, index.to(logits.device), -torch.inf)

    return rule


def suppress_first(tokens: Sequence[int], start: int) -> Rule:
    """These tokens not as the first after a prompt of `start` ids (a blank or an immediate end)."""
    never = suppress(tokens)

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        return never(ids, logits) if ids.shape[1] == start else logits

    return rule


def timestamps(begin: int, eot: int, no_timestamps: int, start: int, latest_first: int | None = 50) -> Rule:
    """Time tokens (from id `begin` on) come first, in pairs except before the end, and never go back.

    A prompt has `start` ids. The first time is at most `latest_first` steps of 0.02 s. Where all times together
    are more probable than any text token, a time must follow. As openai-whisper's ApplyTimestampRules."""

    def rule(ids: Int[Tensor, "B T"], logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        token = torch.arange(logits.shape[-1], device=logits.device)
        text, made = token < begin, ids[:, start:]
        forbidden = _out_of_order(made, token, begin, eot) | (token == no_timestamps)
        if not made.shape[1]:
            forbidden |= text
            if latest_first is not None:
                forbidden |= token > begin + latest_first
        logprobs = logits.masked_fill(forbidden, -torch.inf).log_softmax(-1)
        timely = logprobs[:, begin:].logsumexp(-1) > logprobs[:, :begin].amax(-1)
        return logits.masked_fill(forbidden | (timely[:, None] & text), -torch.inf)

    return rule


def _out_of_order(made: Int[Tensor, "B N"], token: Int[Tensor, "V"], begin: int, eot: int) -> Tensor:
    """[B V]: what the pairs and the order of times forbid after the ids `made`."""
    rows, count = made.shape
    is_time = made >= begin
    last = is_time[:, -1] if count else is_time.new_zeros(rows)
    before = is_time[:, -2] if count > 1 else is_time.new_ones(rows)
    closing = last & ~before  # one time of a pair: the second, equal or later, or the end must follow
    forbidden = (last & before)[:, None] & (token >= begin)
    forbidden = forbidden | (closing[:, None] & (token < eot))
    if count:
        latest = made.masked_fill(~is_time, -1).amax(-1)  # times do not go back, so the last is the largest
        earliest = torch.where(closing, latest, latest + 1)
        forbidden |= (latest >= begin)[:, None] & (token >= begin) & (token < earliest[:, None])
    return forbidden


def no_speech_probability(logits: Float[Tensor, "B V"], no_speech: int) -> Float[Tensor, "B"]:
    """The probability of the no-speech token, from the logits that follow <|startoftranscript|>."""
    return logits.float().softmax(-1)[:, no_speech]
