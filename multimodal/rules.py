"""Whisper's rules for the next token (Radford et al. 2022, section 4.5), as `search` takes them.

They write into the logits they get."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.search import Rule


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
