"""Jobs of text: chat answers, translations and embeddings."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.decoding.logits import Penalties
from multimodal.errors import TextError, UsageError
from multimodal.models.any_to_text import AnyToText
from multimodal.serve.jobs.images import each_image
from multimodal.serve.jobs.lane import Job, Stream, Work, one_request
from multimodal.serve.jobs.lengths import length_read
from multimodal.serve.jobs.token_bytes import spellings, token_score
from multimodal.serve.models import ServedModel
from multimodal.tasks.ask.asker import settings
from multimodal.tasks.ask.writer import AnswerWriter
from multimodal.tasks.encode.search_defaults import search_defaults
from multimodal.tasks.text.detokenize import BEFORE, token_texts
from multimodal.tasks.text.embed import check_text, prompt_text
from multimodal.tasks.text.embedder import Embedder
from multimodal.tasks.text.generate import Continuation, TextWriter
from multimodal.tasks.text.options import GenerateOptions, options_for
from multimodal.tasks.text.translate import Translation, TranslationWriter, asked_of
from multimodal.tokens.chat.messages import Message
from multimodal.tokens.text.tokenizer import Tokenizer

LONGEST_TOKEN = 256  # characters
TokenScores = list[dict[str, Any]]


class Answered(NamedTuple):
    """`prompt_tokens`: with those of the media. `scores`: of the tokens of each answer, if asked for."""

    answers: list[Continuation]
    prompt_tokens: int
    scores: list[TokenScores | None]


class ChatModel:
    """A served model that answers messages: any-to-text, or a language model with or without a chat template (whose
    prompt is then the messages' texts, a line each)."""

    def __init__(self, served: ServedModel):
        self.served, self.media = served, None

    def writer(self, options: Mapping[str, Any], penalties: Penalties | None = None) -> TextWriter:
        """Raises UsageError."""
        checkpoint, options = self.served.checkpoint, {"beam_size": 1, **options}
        if isinstance(checkpoint.model, AnyToText):
            made = AnswerWriter(checkpoint, *settings(checkpoint, options))
            self.media = made.media = self.media or made.media  # keeps what was encoded
        else:
            made = TextWriter(checkpoint, options_for(search_defaults(checkpoint, options, GenerateOptions)))
        size = made.tokenizer.vocab_size
        if wrong := [token for token, _ in (penalties or Penalties()).bias if not 0 <= token < size]:
            raise UsageError(f"{wrong[0]} is not among the {size} tokens of the model", argument="logit_bias")
        made.penalties = penalties
        return made

    def answers(
        self, messages: Sequence[Message], options: Mapping[str, Any], top: int | None = None,
        penalties: Penalties | None = None, give: Callable[[str], None] | None = None,
    ) -> Job:  # fmt: skip
        """A job with `Answered`; `top`: see `token_scores`. `give` is called with each piece of the one answer; other
        jobs have turns between them. Raises UsageError, TextError."""
        writer = self.writer(options, penalties)
        if give:
            writer.check_stream()
        check_length(writer, sum(len(one.text) for one in messages), "messages")
        score = None if top is None else partial(token_scores, top=top)
        return Job(iter([self.stream(writer, lambda: self._prompt(writer, messages), "messages", score, give)]))

    def stream(
        self, writer: TextWriter, read: Callable[[], Any], name: str,
        score: Callable[[TextWriter, Any, Continuation], TokenScores] | None, give: Callable[[str], None] | None = None,
    ) -> Stream:  # fmt: skip
        """Requests for the answers to the prompt that `read` gives, called `name` in errors; returns `Answered`."""
        prompt = yield self.alone(read)
        self.end_at_context(writer, prompt, name)
        if give:
            pieces = writer.pieces(prompt)
            while isinstance(piece := (yield self.alone(lambda: _next(pieces))), str):
                give(piece)
            answers = [piece]
        else:
            writer.interrupt = self.served.lane.check
            key = ("chat", str(vars(writer.options) | {"seed": None}), writer.penalties)
            answers = yield Work(key, (prompt, writer.options.seed), lambda some: self._write(writer, some))
        scores = yield self.alone(lambda: [score and score(writer, prompt, one) for one in answers])
        return Answered(answers, len(ids_of(prompt)), scores)

    @staticmethod
    def alone(work: Callable[[], Any]) -> Work:
        return Work(object(), None, lambda _: [work()])

    @staticmethod
    def end_at_context(writer: TextWriter, prompt: Any, name: str) -> None:
        """End an answer at the context that the model was trained on, which a model without a table of positions would
        write past. Raises TextError for a prompt beyond it."""
        if writer.encoder is None and writer.limit is None:
            count, options = len(ids_of(prompt)), writer.options
            if count > writer.context:
                raise TextError(f"{name}: {count} tokens, the model's context is {writer.context}")
            room = writer.context - count + 1  # the last token is not read again
            writer.options = options.replace(max_new_tokens=min(options.max_new_tokens, room))

    def _prompt(self, writer: TextWriter, messages: Sequence[Message]) -> Any:
        checkpoint = self.served.checkpoint
        if isinstance(writer, AnswerWriter):
            return writer.prompt(messages)
        if others := [part.kind for one in messages for part in one.parts if part.kind != "text"]:
            raise TextError(f"model {checkpoint.source}: takes no {others[0]} (it takes text alone)")
        if checkpoint.chat is None:
            return writer.ids("\n".join(one.text for one in messages), "messages")
        return checkpoint.chat.ids(messages, [], writer.tokenizer, f"model {checkpoint.source}: chat template")[0]

    def _write(self, writer: TextWriter, payloads: list[tuple[Any, int]]) -> list[list[Continuation]]:
        prompts, writer.seeds = map(list, zip(*payloads, strict=True))
        return writer.answers(prompts) if isinstance(writer, AnswerWriter) else writer(prompts)


def check_length(writer: TextWriter, length: int, name: str) -> None:
    """Refuse characters that no vocabulary fits into the context before they take the time to be encoded."""
    most = writer.limit or writer.context
    if length > most * LONGEST_TOKEN:
        raise TextError(f"{name}: {length} characters, the model's context is {most} tokens")


def _next(pieces: Iterator[str]) -> str | Continuation:
    """The next piece of a text, or all of it after the last one."""
    try:
        return next(pieces)
    except StopIteration as end:
        return end.value


def token_scores(writer: TextWriter, prompt: Any, answer: Continuation, top: int) -> TokenScores:
    """Log-probabilities of an answer's tokens, in OpenAI's form, each with those of the `top` most probable tokens in
    its place. They are the model's own, before temperature, penalties and stop strings."""
    before = writer.before(ids_of(prompt))
    ids, texts = shown(writer.tokenizer, before, answer)
    if not ids:
        return []
    return described(writer.tokenizer, before, ids, texts, [rivals_of(writer.logits(prompt, ids), ids, top)])


def shown(tokenizer: Tokenizer, before: list[int], answer: Continuation) -> tuple[list[int], list[str]]:
    """The ids of an answer without a stop string at its end, and what each adds to the text."""
    ids = list(answer.ids)
    texts, length = token_texts(tokenizer, before, ids), 0
    for i, text in enumerate(texts):
        if answer.stopped == "stop" and length >= len(answer.text):
            return ids[:i], texts[:i]
        length += len(text)
    return ids, texts


class Rivals(NamedTuple):
    """Log-probabilities of tokens, and the values and ids of the most probable ones in the place of each."""

    own: list[float]
    values: list[list[float]]
    best: list[list[int]]


def rivals_of(logits: Float[Tensor, "N V"], ids: Sequence[int], top: int) -> Rivals:
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0]
    values, best = logprobs.topk(top)
    return Rivals(own.tolist(), values.tolist(), best.tolist())


def described(
    tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int], texts: Sequence[str], rivals: Iterable[Rivals]
) -> TokenScores:
    """Tokens after `before` in OpenAI's form; `texts`: what each adds."""
    found, whole, spelled = TokenScores(), [*before, *ids], spellings(tokenizer, ids, texts)
    places = (place for part in rivals for place in zip(*part, strict=True))
    for i, (own, values, best) in enumerate(places, len(before)):
        others = []
        for token, value in zip(best, values, strict=True):
            (made,) = spellings(tokenizer, [token], token_texts(tokenizer, whole[max(i - BEFORE, 0) : i], [token]))
            others.append(token_score(made, value))
        found.append(token_score(spelled[i - len(before)], own) | {"top_logprobs": others})
    return found


def ids_of(prompt: Any) -> list[int]:
    return prompt if isinstance(prompt, list) else prompt.ids


def translations(served: ServedModel, texts: Sequence[str], source: str | None, target: str | None) -> Job:
    """A job with a `Translation` of each text. Raises UsageError, TextError, also for a text beyond the context."""
    options = asked_of(served.checkpoint, {"on_long": "error"})
    writer, sources = TranslationWriter(served.checkpoint, source, target, options), []
    for number, text in enumerate(texts):
        try:
            sources.append(writer.read(text))
        except TextError as error:
            raise TextError(f"input[{number}]: {error}") from None

    def serve(payloads: list[Any]) -> list[list[Translation]]:
        found = iter(writer(list(itertools.chain(*payloads))))
        return [list(itertools.islice(found, len(one))) for one in payloads]

    return one_request(Work(("translate", source, target), sources, serve))


class EmbeddingModel:
    """Vectors of texts and images by a served model."""

    def __init__(self, served: ServedModel):
        self.served = served
        self.embedder = Embedder(served.checkpoint, device=None, per_clip=True)

    def read(self, inputs: Sequence[str | list[int]]) -> tuple[list[str], int]:
        """Texts, of which some are given as token ids, and the number of tokens that the model reads of them, with its
        prompt and control tokens. Raises TextError for more than the model's context."""
        checkpoint, texts, total = self.served.checkpoint, list[str](), 0
        before = prompt_text(checkpoint, None)
        for number, one in enumerate(inputs):
            place = f"input[{number}]"
            try:
                texts.append(one if isinstance(one, str) else text_of(one, checkpoint.required_tokenizer()))
            except TextError as error:
                raise TextError(f"{place}: {error}") from None
            check_text(texts[-1], place)
            total += length_read(checkpoint, before + texts[-1], place)
        return texts, total

    def texts(self, texts: list[str]) -> Job:
        """A job with the vectors [N D]."""
        return one_request(Work("texts", texts, self._texts))

    def images(self, images: list[Any]) -> Job:
        return one_request(Work("images", images, self._images))

    def _texts(self, payloads: list[list[str]]) -> list[np.ndarray]:
        vectors = self.embedder.texts(list(itertools.chain(*payloads)))
        return np.split(vectors, np.cumsum([len(one) for one in payloads])[:-1])

    def _images(self, payloads: list[list[Any]]) -> list[np.ndarray]:
        found = each_image(payloads, "input", self.embedder.many)
        return [np.stack(one) for one in found]


def text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    """Text of token ids, with or without those that begin and end a text. Raises TextError for ids of no text: the
    model would embed others."""
    begins, ends = ids[:1] == [tokenizer.bos_id], ids[-1:] == [tokenizer.eos_id]
    own = ids[begins : len(ids) - ends]
    text = tokenizer.spelled(own)
    if tokenizer.encode(text) != own:
        raise TextError(f"expected token ids as the model encodes a text (it encodes {text[:40]!r} otherwise)")
    return text
