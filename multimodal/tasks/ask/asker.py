"""Questions about images, sound, video and text, answered by an any-to-text model."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from multimodal.errors import CheckpointError, MultimodalError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.any_to_text import AnyToText
from multimodal.system.files import shown
from multimodal.tasks.ask.writer import AnswerWriter, Prompt
from multimodal.tasks.encode.arguments import AskArguments, AskerArguments
from multimodal.tasks.encode.loaded import Item, Items, LoadedModel, Model, answered, device_of, loaded, local
from multimodal.tasks.encode.search_defaults import search_defaults, warn_of_search
from multimodal.tasks.text.generate import Continuation
from multimodal.tasks.text.options import GenerateOptions, options_for
from multimodal.tokens.audio.names import starts_audio
from multimodal.tokens.audio.reading import AUDIO
from multimodal.tokens.chat.messages import Kind, Message, MessagePart, read_messages
from multimodal.tokens.video.names import first_bytes, is_video
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.reading import is_audio_alone
from multimodal.weights.folder import Checkpoint

SOUND = {f".{name}" for name in AUDIO.split()}


class Asker(LoadedModel):
    """Any-to-text model: loads once and answers questions about images, sound and video.

    `options`: see `GenerateOptions`, and `VideoOptions` for the frames of videos; defaults come from "ask" in the
    model's card. `device`: `auto` is a GPU if there is one; `compute_type`: see `prepare_for_inference`. `urls`: read
    http and https URLs. Inputs are encoded once, however many questions are asked.

    Raises UsageError, CheckpointError."""

    def __init__(
        self, model: Model | None = None, *, device: str | torch.device | None = "auto", compute_type: str = "auto",
        urls: bool = False, **options: Unpack[AskArguments],
    ):  # fmt: skip
        checkpoint = prepared(model, compute_type, device)
        self.writer = AnswerWriter(checkpoint, *settings(checkpoint, options))
        warn_of_search(checkpoint, options, GenerateOptions)
        self.urls = urls

    def __call__(self, question: str, *inputs: Any) -> str:
        """Answer a question about any number of inputs: images, recordings and videos as the other classes take them.
        Raises the errors of its inputs, TextError for more than the context holds."""
        return self.chat([self.message(question, inputs)])

    def message(self, question: str, inputs: Sequence[Any] = ()) -> Message:
        """A user's message: the inputs, then the question."""
        if not isinstance(question, str) or not question.strip():
            raise UsageError(f"expected a text (got {shown(question)})", argument="question")
        sources = [local(one, self.urls) for one in inputs]
        parts = [MessagePart(kind_of_input(one), one) for one in sources]
        return Message("user", (*parts, MessagePart("text", question)))

    def chat(self, messages: Sequence[Message | Mapping[str, Any]]) -> str:
        """The assistant's next message of a conversation (see `read_messages`)."""
        with self._lock:
            ((best, *_),) = self.writer.answers([self.writer.prompt(self._read(messages))])
        return best.text.strip()

    def stream(self, question: str, *inputs: Any) -> Iterator[str]:
        """Yield the answer piece by piece. Any thread may take the next piece; other calls take turns with the pieces.
        Raises UsageError for a beam search."""
        with self._lock:
            prompt = self.writer.prompt([self.message(question, inputs)])
        return self._queued(self.writer.pieces(prompt))

    def conversation(self) -> "Conversation":
        """A conversation whose turns keep what was computed for those before."""
        return Conversation(self)

    def many(self, items: Iterable[tuple[str, Sequence[Any]]]) -> Iterator[list[Continuation] | MultimodalError]:
        """Yield the answers to each (question, inputs), best first, batch by batch; an item that fails gives its error.
        Answers do not depend on the batch."""
        return self._many(items, self._question)

    def chat_many(
        self, conversations: Iterable[Sequence[Message | Mapping[str, Any]]]
    ) -> Iterator[list[Continuation] | MultimodalError]:  # fmt: skip
        """Yield the assistant's next messages of each conversation, as `many`."""
        return self._many(conversations, lambda item: self._read(item.source))

    @inference_mode()
    def loss(self, messages: Sequence[Message | Mapping[str, Any]], answer: str) -> tuple[float, int]:
        """Negative log-probability (nats) of an answer with its end, and its number of tokens."""
        with self._lock:
            return self.writer.loss(self.writer.prompt(self._read(messages)), answer)

    def _read(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
        """Messages whose URLs are local files. Raises UsageError, DataError."""
        place = lambda part: part if part.kind == "text" else replace(part, value=local(part.value, self.urls))
        return [replace(one, parts=tuple(map(place, one.parts))) for one in read_messages(messages)]

    def _question(self, item: Item) -> list[Message]:
        several = isinstance(item.source, list | tuple) and len(item.source) == 2
        if not several or not isinstance(item.source[1], list | tuple):
            name = f"item {item.position + 1}"
            raise UsageError(f"{name}: expected (question, list of inputs) (got {shown(item.source)})")
        return [self.message(*item.source)]

    def _many(self, items: Iterable[Any], read: Callable[[Item], list[Message]]) -> Iterator[Any]:
        prompt = lambda item: self.writer.prompt(read(item), f"item {item.position + 1}")
        sources, writer = Items(items, keyed=False, paths=False), self.writer
        return self._queued(answered(sources, writer.options.batch_size, prompt, writer.answers))


class Conversation:
    """Several turns with one `Asker`. `messages`: all so far."""

    def __init__(self, asker: Asker):
        self.asker, self.messages = asker, list[Message]()
        self._cache, self._seen = asker.writer.decoder.new_cache(), Prompt([], [], [])

    def ask(self, question: str, *inputs: Any) -> str:
        """The answer to a further question. A turn that fails leaves the conversation as it was."""
        asker, writer = self.asker, self.asker.writer
        message = asker.message(question, inputs)
        with asker._lock:
            messages = [*self.messages, message]
            prompt = writer.prompt(messages)
            seen, self._seen = self._seen, Prompt([], [], [])  # so that a turn that fails leaves nothing to the next
            self._cut(seen, prompt)
            writer.cache = self._cache if not writer.network.config.crosses else None
            try:
                ((best, *_),) = writer.answers([prompt])
            finally:
                writer.cache = None
            text = best.text.strip()
            self._seen = prompt
            self.messages = [*messages, Message("assistant", (MessagePart("text", text),))]
        return text

    def _cut(self, old: Prompt, new: Prompt) -> None:
        """Keep of the cache what the new prompt begins with; the last id is always computed."""
        same = [a == b for a, b in zip(old.ids, new.ids, strict=False)]
        common = same.index(False) if False in same else len(same)
        media = [one.digest for one in old.media]
        if media != [one.digest for one in new.media][: len(media)]:
            common = 0
        if self.asker.writer.options.beam_size > 1 or self.asker.writer.options.num_return > 1:
            common = 0  # the cache holds the rows of several answers
        switch = self.asker.writer.decoder.config.positions.switch
        if switch is not None and len(new.ids) > switch:
            common = 0  # keys turn by the length of the text
        try:
            self._cache.cut(min(common, len(new.ids) - 1))
        except ValueError:  # a window keeps no more than its last positions
            common = 0
        if not common:
            self._cache = self.asker.writer.decoder.new_cache()


def ask(question: str, *inputs: Any, model: Model | None = None, **options: Unpack[AskerArguments]) -> str:
    """Answer a question about images, sound and video with a new `Asker`. Each call loads the model."""
    return Asker(model, **options)(question, *inputs)


def prepared(model: Model | None, compute_type: str, device: str | torch.device | None) -> Checkpoint:
    """Load and check an any-to-text model and prepare it for inference. Raises UsageError, CheckpointError."""
    checkpoint = loaded(model, "ask")
    if not isinstance(checkpoint.model, AnyToText):
        raise UsageError(f"model {checkpoint.source}: expected an any-to-text model, got {checkpoint.kind}")
    checkpoint.required_tokenizer()
    if checkpoint.chat is None:
        raise CheckpointError(f"model {checkpoint.source}: checkpoint has no chat template")
    return prepare_for_inference(checkpoint, compute_type, device_of(device, checkpoint))


def settings(checkpoint: Checkpoint, given: Mapping[str, Any]) -> tuple[GenerateOptions, VideoOptions]:
    """`given` options, else those of the card, else those of generation_config.json, else the defaults. Any choice of
    frames replaces all of the card's. Raises UsageError; CheckpointError for the card's."""
    own = checkpoint.card.get("ask") or {}
    try:
        _settings(own)
    except UsageError as error:
        raise CheckpointError(f"{checkpoint.source}: card, ask: {error}") from None
    if VideoOptions.among(given):
        own = {name: value for name, value in own.items() if name not in VideoOptions.declared}
    return _settings(search_defaults(checkpoint, {**own, **given}, GenerateOptions))


def _settings(values: Mapping[str, Any]) -> tuple[GenerateOptions, VideoOptions]:
    others = {name: value for name, value in values.items() if name not in VideoOptions.declared}
    return options_for(others), VideoOptions(**VideoOptions.among(values))


def kind_of_input(source: Any) -> Kind:
    """Kind of an input: a file by its suffix, others by their first bytes, audio as (rate, array), {"array",
    "sampling_rate"} or a decoder of it, other arrays as images, {"bytes", "path"} as what it holds. A container without
    video is audio."""
    if isinstance(source, MessagePart):
        return source.kind
    if isinstance(source, Mapping) and source.get("array") is None:
        source = next((source[name] for name in ("bytes", "path") if source.get(name) is not None), source)
    if isinstance(source, str | Path) and os.path.splitext(str(source))[1].lower() in SOUND:
        return "audio"
    if isinstance(source, Mapping | tuple) or hasattr(source, "get_all_samples"):
        return "audio"
    if isinstance(source, np.ndarray | Tensor) and source.ndim == 1:
        raise UsageError("sound in an array needs its rate: (rate, array)", argument="inputs")
    if is_video(source):
        return "audio" if is_audio_alone(source) else "video"
    return "audio" if starts_audio(first_bytes(source)) else "image"
