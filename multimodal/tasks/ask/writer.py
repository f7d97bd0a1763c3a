"""Answers of an any-to-text model to rendered conversations."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.sampling import Step, greedy, left_pad
from multimodal.errors import TextError
from multimodal.inference.cuda_graphs import fast_step
from multimodal.inference.modules import inference_mode
from multimodal.models.any_to_text import AnyToText
from multimodal.tasks.ask.media import Encoded, MediaEncoder
from multimodal.tasks.text.generate import Continuation, TextWriter
from multimodal.tasks.text.options import GenerateOptions
from multimodal.tokens.chat.messages import Message
from multimodal.tokens.video.options import VideoOptions
from multimodal.weights.folder import Checkpoint


class Prompt(NamedTuple):
    """Ids of a conversation with placeholders, and its media in the order in which the template wrote them. `order`:
    their indices in the messages."""

    ids: list[int]
    media: list[Encoded]
    order: list[int]


def answer_step(
    model: AnyToText, ids: Int[Tensor, "B T"], media: Sequence[Float[Tensor, "_ D"]], start: Int[Tensor, "B"] | None,
    capacity: int, known: Cache | None = None,
) -> tuple[Step, Cache]:  # fmt: skip
    """A step and its cache for `multimodal.decoding`, whose prompts `ids` have these rows of media. `known`: a cache
    with the first positions of the only prompt."""
    if model.config.crosses:
        source, valid = model.source(media)
        return fast_step(model.decoder, source, start, capacity, valid, last=1)
    step, cache = fast_step(model.decoder, None, start, capacity, None, last=1)
    if known is not None:
        step, cache = lambda ids, cache: model.decoder(ids, cache=cache, last=1), known
    embedded = [model.embed(ids, media)]

    def first_embedded(ids: Int[Tensor, "B T"], cache: Cache) -> Float[Tensor, "B N V"]:
        if not embedded:
            return step(ids, cache)
        new = cache.length  # positions that the conversation has computed
        return model.decoder(ids[:, new:], cache=cache, last=1, embedded=embedded.pop()[:, new:])

    return first_embedded, cache


class AnswerWriter(TextWriter):
    """Any-to-text model with options; called with prompts, it returns the answers to each, best first."""

    def __init__(self, checkpoint: Checkpoint, options: GenerateOptions, video: VideoOptions):
        super().__init__(checkpoint, options)
        self.network: AnyToText = checkpoint.model
        self.media = MediaEncoder(checkpoint, video, self.limit or self.context)
        self.cache: Cache | None = None  # of a conversation: the state after its last turn
        self.pending: list[Tensor] = []  # media of the prompts that `start` gets

    def prompt(self, messages: Sequence[Message], name: str = "messages") -> Prompt:
        """Read and encode a conversation. Raises TextError for one that exceeds the context, and the errors of its
        media."""
        opened = self.media.opened(messages)
        media = self.media(opened)
        where = f"model {self.checkpoint.source}: chat template"
        ids, order = self.checkpoint.chat.ids(opened, [one.markup for one in media], self.tokenizer, where)
        if not ids:
            raise TextError(f"{name}: the chat template made no token of them")
        if len(ids) > (most := self.limit or self.context):
            raise TextError(f"{name}: have {len(ids)} tokens, the model's context is {most}")
        return Prompt(ids, [media[i] for i in order], order)

    def answers(self, prompts: Sequence[Prompt]) -> list[list[Continuation]]:
        """Answers to each prompt, best first."""
        self.pending = [self._rows(one.media) for one in prompts]
        return self([one.ids for one in prompts])

    def answer_ids(self, prompt: Prompt) -> list[int]:
        """Ids of the greedy answer, without those that end it."""
        self.pending = [self._rows(prompt.media)]
        limit = self.max_new(prompt.ids)
        step, cache, ids = self.start([prompt.ids], limit)
        processors = self._processors(ids.shape[1], limit)
        return greedy(step, ids, cache, eos=self.ends, max_new=limit, processors=processors).ids[0]

    def pieces(self, prompt: Prompt) -> Iterator[str]:
        """Yield the answer piece by piece. Raises UsageError for a beam search or several answers."""
        self.check_stream()
        return self._answer(prompt)

    def _answer(self, prompt: Prompt) -> Iterator[str]:
        self.pending = [self._rows(prompt.media)]  # in the first step, as that of another answer may come before
        return (yield from self._streamed(prompt.ids, self.max_new(prompt.ids)))

    def loss(self, prompt: Prompt, answer: str) -> tuple[float, int]:
        """Negative log-probability (nats) of an answer with its end, and its number of tokens."""
        said = [*self.tokenizer.encode(answer), *self.ends[:1]]
        logits = self.logits(prompt, said)
        return float(F.cross_entropy(logits, torch.tensor(said, device=logits.device), reduction="sum")), len(said)

    @inference_mode()
    def logits(self, prompt: Prompt, ids: Sequence[int]) -> Float[Tensor, "N V"]:
        whole = torch.tensor([[*prompt.ids, *ids]], device=self.decoder.device)
        return self.network(whole[:, :-1], [self._rows(prompt.media)])[0, len(prompt.ids) - 1 :].float()

    def _rows(self, media: Sequence[Encoded]) -> Float[Tensor, "R D"]:
        width = self.network.config.decoder.width
        empty = torch.zeros(0, width, dtype=torch.float32, device=self.decoder.device)
        return torch.cat([empty, *(one.rows for one in media)])

    def start(
        self, prompts: list[list[int]], most: int | None = None
    ) -> tuple[Step, Cache, Int[Tensor, "B T"]]:  # fmt: skip
        ids, start = left_pad(prompts, self.decoder.device)
        step, cache = answer_step(self.network, ids, self.pending, start, ids.shape[1] + most, self.cache)
        return step, cache, ids
