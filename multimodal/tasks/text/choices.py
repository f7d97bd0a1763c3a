"""Multiple choice: rank answers by their probability after a prompt."""

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from multimodal.errors import TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.tasks.text.generate import TextWriter
from multimodal.tokens.text.tokenizer import Tokenizer, texts_of


class Choice(NamedTuple):
    """An answer. `logprob`: sum over its tokens; `score`: `logprob` / tokens^`length_penalty`."""

    text: str
    score: float
    logprob: float
    tokens: int


def checked_choices(choices: Sequence[str]) -> list[str]:
    """Return the choices as a list. Raises UsageError for fewer than two, an empty one or a duplicate."""
    if len(texts := texts_of(choices, "choices", UsageError)) < 2:
        raise UsageError(f"choices: expected at least two ({choices!r:.40})")
    for index, choice in enumerate(texts):
        if not choice.strip():
            raise UsageError(f"choices: number {index + 1} is empty")
        if choice in texts[:index]:
            raise UsageError(f"choices: {choice[:40]!r} is repeated")
    return texts


@inference_mode()
def scored(write: TextWriter, prompt: str, choices: list[str], name: str = "prompt") -> list[Choice]:
    """Rank checked choices, best score first. Prompt and choice are joined by a space if neither has one. With an
    encoder-decoder, the end of the answer counts as a token.

    Options: `length_penalty` and `on_long`. Raises TextError."""
    row, answers = write.ids(prompt, name), [_answer(write, prompt, choice) for choice in choices]
    for choice, ids in zip(choices, answers, strict=True):
        if not ids:
            raise TextError(f"choices: {choice[:40]!r} has no token in this vocabulary")
        if (limit := write.decoder.config.limit) and (write.encoder is None) * len(row) + len(ids) - 1 > limit:
            raise TextError(f"choices: {choice[:40]!r} has {len(ids)} tokens, beyond the context of {limit}")
    longest = len(row) + max(map(len, answers)) - 1
    if write.encoder is None and write.limit is None and len(row) <= write.context < longest:
        trained = f"the model was trained on {write.context}"
        warnings.warn(f"{name}: has {longest} tokens with a choice, {trained}: scores may be meaningless", stacklevel=2)
    switch = None if write.encoder else write.decoder.config.positions.switch
    if switch and len(row) <= switch < longest:  # the prompt's keys turn with the length: each answer has its own
        each = [_whole(write, row, own) for own in answers]
    else:
        each = _logprobs(write, row, answers)
    results = []
    for choice, own, values in zip(choices, answers, each, strict=True):
        write.check(all(map(math.isfinite, values[: len(own)])))
        logprob = math.fsum(values[: len(own)])
        results.append(Choice(choice, logprob / len(own) ** write.options.length_penalty, logprob, len(own)))
    return sorted(results, key=lambda one: -one.score)


def _logprobs(write: TextWriter, row: list[int], answers: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the tokens of answers to an encoded prompt; what follows the shorter ones is padding."""
    step, cache, ids = write.start([row])
    rows = pad_sequence([torch.tensor(one, device="cpu") for one in answers], batch_first=True).to(ids.device)
    first = step(ids, cache)[:, -1:].expand(len(answers), -1, -1)
    cache.reorder_rows(torch.zeros(len(answers), dtype=torch.long, device=ids.device))
    logits = torch.cat([first, step(rows[:, :-1], cache)], 1) if rows.shape[1] > 1 else first
    return logits.float().log_softmax(-1).gather(2, rows[..., None])[..., 0].double().tolist()


def _whole(write: TextWriter, row: list[int], answer: list[int]) -> list[float]:
    """The same of one answer, without a cache."""
    ids = torch.tensor([[*row, *answer]], device=write.decoder.device)
    logits = write.decoder(ids[:, :-1])[0, len(row) - 1 :].float().log_softmax(-1)
    return logits.gather(1, ids[0, len(row) :, None])[:, 0].double().tolist()


def _answer(write: TextWriter, prompt: str, choice: str) -> list[int]:
    """Token ids of a choice after the prompt."""
    tokenizer = write.tokenizer
    if write.encoder is not None:
        # an answer may begin with a token such as BART's begin of text
        begin, end = tokenizer.frame
        return [*begin, *tokenizer.encode(choice), *end]
    joined = prompt if not prompt or prompt[-1].isspace() or choice[0].isspace() else prompt + " "
    return continuation_ids(tokenizer, prompt, joined[len(prompt) :] + choice, alone=choice)[1]


def continuation_ids(
    tokenizer: Tokenizer, before: str, after: str, alone: str | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a text and of what follows it, which may begin with a space. `alone`: what is encoded for `after`
    where the tokens of the two do not part there."""
    head, whole = tokenizer.encode(before), tokenizer.encode(before + after)
    parts = whole[: len(head)] == head
    return head, whole[len(head) :] if parts else tokenizer.encode(after if alone is None else alone)
