"""Continuations of plain prompts, whose own tokens may be scored, too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from multimodal.decoding.logits import Penalties
from multimodal.errors import TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.any_to_text import AnyToText
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.serve.jobs.lane import Job, Stream
from multimodal.serve.jobs.texts import (
    Answered,
    ChatModel,
    Rivals,
    TokenScores,
    check_length,
    described,
    rivals_of,
    shown,
    token_scores,
)
from multimodal.serve.jobs.token_bytes import spellings, token_score
from multimodal.tasks.text.detokenize import token_texts
from multimodal.tasks.text.generate import Continuation, TextWriter

CHUNK = 256  # tokens whose logits exist at a time
Prompt = str | list[int]


class CompletionJob(Job):
    """A job with `Answered` of each prompt, a text or its token ids. `most`: new tokens, 0 for none; `top`: see
    `token_scores`; `echo`: score the prompts' tokens, too. `give` is called with each piece of the one answer. Raises
    UsageError, TextError."""

    def __init__(
        self, chat: ChatModel, prompts: Sequence[Prompt], options: Mapping[str, Any], most: int, *,
        top: int | None = None, echo: bool = False, penalties: Penalties | None = None,
        give: Callable[[str], None] | None = None,
    ):  # fmt: skip
        checkpoint = chat.served.checkpoint
        if isinstance(checkpoint.model, AnyToText):
            raise UsageError(f"{checkpoint.source}: answers messages, expected a language model", argument="model")
        if echo and isinstance(checkpoint.model, EncoderDecoder):
            raise UsageError(f"needs a decoder alone ({checkpoint.source} has an encoder)", argument="echo")
        self.found: dict[int, Answered] = {}
        score = None if top is None else partial(echoed_scores if echo else token_scores, top=top)

        def stream(number: int, prompt: Prompt, name: str) -> Stream:
            writer, head = chat.writer(dict(options) | {"max_new_tokens": max(most, 1)}, penalties), ""

            def read() -> list[int]:
                nonlocal head
                ids = ids_of(writer, prompt, name)
                if echo:
                    head = prompt if isinstance(prompt, str) else writer.tokenizer.decode(prompt)
                    if give:
                        give(head)
                return ids

            if most:
                made = yield from chat.stream(writer, read, name, score, give)
            else:
                made = yield from _unanswered(chat, writer, read, name, score)
            return number, made._replace(answers=[one._replace(text=head + one.text) for one in made.answers])

        names = [f"prompt[{i}]" for i in range(len(prompts))] if len(prompts) > 1 else ["prompt"]
        super().__init__(stream(i, *one) for i, one in enumerate(zip(prompts, names, strict=True)))

    def ended(self, value: tuple[int, Answered]) -> None:
        self.found[value[0]] = value[1]

    def result(self) -> list[Answered]:
        return [self.found[number] for number in range(len(self.found))]


def _unanswered(
    chat: ChatModel, writer: TextWriter, read: Callable[[], list[int]], name: str,
    score: Callable[[TextWriter, Any, Continuation], TokenScores] | None,
) -> Stream:  # fmt: skip
    """As `ChatModel.stream`, of answers without a token."""
    ids, none = (yield chat.alone(read)), Continuation("", 0.0, 0.0, 0, "max_new_tokens")
    chat.end_at_context(writer, ids, name)
    scores, count = (yield chat.alone(lambda: score and score(writer, ids, none))), writer.options.num_return
    return Answered([none] * count, len(ids), [scores] * count)


def ids_of(writer: TextWriter, prompt: Prompt, name: str) -> list[int]:
    """The ids that a model reads of a prompt: of ids themselves. Raises TextError."""
    if isinstance(prompt, str):
        check_length(writer, len(prompt), name)
        return writer.ids(prompt, name)
    size, most = writer.tokenizer.vocab_size, writer.limit
    if not prompt:
        raise TextError(f"{name}: is empty")
    if wrong := [one for one in prompt if not 0 <= one < size]:
        raise TextError(f"{name}: {wrong[0]} is not among the {size} tokens of the model")
    if most is not None and len(prompt) > most:
        raise TextError(f"{name}: has {len(prompt)} tokens, the model's context is {most}")
    return prompt


def echoed_scores(writer: TextWriter, prompt: list[int], answer: Continuation, top: int) -> TokenScores:
    """`token_scores` of the prompt and the answer; the first token has none."""
    tokenizer, (more, added) = writer.tokenizer, shown(writer.tokenizer, prompt, answer)
    texts, ids = [*token_texts(tokenizer, [], prompt), *added], [*prompt, *more]
    first = token_score(spellings(tokenizer, ids[:1], texts[:1])[0], None) | {"top_logprobs": None}
    return [first, *described(tokenizer, ids[:1], ids[1:], texts[1:], _rivals(writer, ids, top))]


@inference_mode()
def _rivals(writer: TextWriter, ids: list[int], top: int) -> Iterator[Rivals]:
    """Yield log-probabilities of the ids from the second one on, which are read at once."""
    if len(ids) < 2:
        return
    decoder = writer.decoder
    states = decoder.states(torch.tensor([ids[:-1]], device=decoder.device))[0]
    for start, part in zip(range(1, len(ids), CHUNK), states.split(CHUNK), strict=True):
        yield rivals_of(decoder.logits(part[None])[0].float(), ids[start : start + CHUNK], top)
