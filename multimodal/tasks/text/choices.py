"""Which of several answers a language model finds most probable after a prompt."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from multimodal.errors import TextError, UsageError
from multimodal.tasks.text.generate import TextWriter, prepared
from multimodal.tasks.text.options import options_for
from multimodal.tokens.text.tokenizer import texts_of
from multimodal.weights.folder import Checkpoint


class Choice(NamedTuple):
    """An answer; `logprob`: the sum over its tokens, `score`: that / tokens^`length_penalty`."""

    text: str
    score: float
    logprob: float
    tokens: int


def choose(
    prompt: str, choices: Sequence[str], model: str | Path | Checkpoint, *, compute_type: str = "auto",
    device: str | torch.device | None = None, **options: Any,
) -> list[Choice]:  # fmt: skip
    """All choices, that with the best score first. Of an encoder-decoder the end of the answer counts as a token; a
    language model's continuation may go on. Prompt and choice are joined by a space where neither has one.

    `options`: `length_penalty` and `on_long` of `GenerateOptions`. Raises UsageError, TextError, CheckpointError."""
    write = TextWriter(prepared(model, compute_type, device), options_for(options))
    return scored(write, prompt, checked(choices))


def checked(choices: Sequence[str]) -> list[str]:
    """Raises UsageError for choices that are none."""
    if len(found := texts_of(choices, "choices", UsageError)) < 2:
        raise UsageError(f"choices: at least two are needed ({choices!r:.40})")
    for number, choice in enumerate(found):
        if not choice.strip():
            raise UsageError(f"choices: number {number + 1} is empty")
        if choice in found[:number]:
            raise UsageError(f"choices: {choice[:40]!r} is there twice")
    return found


@torch.inference_mode()
def scored(write: TextWriter, prompt: str, choices: list[str], name: str = "prompt") -> list[Choice]:
    """See `choose`; the choices are checked."""
    row, answers = write.ids(prompt, name), [_answer(write, prompt, choice) for choice in choices]
    for choice, ids in zip(choices, answers, strict=True):
        if not ids:
            raise TextError(f"choices: {choice[:40]!r} has no token of this vocabulary")
        if (limit := write.decoder.config.limit) and (write.encoder is None) * len(row) + len(ids) - 1 > limit:
            raise TextError(f"choices: {choice[:40]!r} has {len(ids)} tokens, and leaves the context of {limit}")
    longest = len(row) + max(map(len, answers)) - 1
    if write.encoder is None and write.limit is None and len(row) <= write.context < longest:
        made = f"the model is made for {write.context}"
        warnings.warn(f"{name}: has {longest} tokens with a choice, {made}: its score may make no sense", stacklevel=2)
    step, cache, ids = write.started([row])
    first = step(ids, cache)[:, -1:].expand(len(choices), -1, -1)
    width = max(map(len, answers))
    rows = torch.tensor([own + [0] * (width - len(own)) for own in answers], device=ids.device)
    cache.reorder_rows(torch.zeros(len(choices), dtype=torch.long, device=ids.device))
    logits = torch.cat([first, step(rows[:, :-1], cache)], 1) if width > 1 else first
    each = logits.float().log_softmax(-1).gather(2, rows[..., None])[..., 0].double()
    write.check(bool(logits.isfinite().all()))
    found = []
    for choice, own, values in zip(choices, answers, each.tolist(), strict=True):
        logprob = math.fsum(values[: len(own)])
        found.append(Choice(choice, logprob / len(own) ** write.options.length_penalty, logprob, len(own)))
    return sorted(found, key=lambda one: -one.score)


def _answer(write: TextWriter, prompt: str, choice: str) -> list[int]:
    """The ids of a choice as it stands after the prompt."""
    tokenizer = write.tokenizer
    if write.encoder is not None:
        # what an answer begins with, such as BART's begin of text, comes before its first letter
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        return [*begin, *tokenizer.encode(choice), *([] if tokenizer.eos_id is None else [tokenizer.eos_id])]
    before = tokenizer.encode(prompt)
    joined = prompt if not prompt or prompt[-1].isspace() or choice[0].isspace() else prompt + " "
    whole = tokenizer.encode(joined + choice)
    return whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(choice)
