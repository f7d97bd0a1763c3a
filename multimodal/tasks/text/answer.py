"""Questions about a text: the span that answers (Devlin et al. 2019, section 4.2), or the best of several choices."""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from multimodal.errors import TextError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.text import TextTransformer
from multimodal.tasks.encode.arguments import AnswerArguments, AnswererArguments
from multimodal.tasks.encode.loaded import LoadedModel, Model, device_of, loaded
from multimodal.tasks.text.choices import checked_choices
from multimodal.tasks.text.options import AnswerOptions
from multimodal.tokens.text.pieces import ContextWindow, PairRow, choice_rows, context_windows
from multimodal.weights.folder import Checkpoint


class Answer(NamedTuple):
    """Characters `start` to `end` of the context, and their probability; of no answer 0 to 0."""

    text: str
    score: float
    start: int
    end: int


class ScoredChoice(NamedTuple):
    """`score`: probability among the choices; `number`: its place among them, from 0."""

    text: str
    score: float
    number: int


class Answerer(LoadedModel):
    """Model that answers questions from a text, as transformers' question-answering pipeline does: by spans of whole
    words in overlapping windows, where the scores of equal texts add up. It is loaded once. `device`: `auto` is a GPU
    if there is one; `compute_type`: see `prepare_for_inference`; `options`: see `AnswerOptions`.

    Raises UsageError, CheckpointError."""

    def __init__(
        self, model: Model | None = None, *, device: str | torch.device | None = "auto", compute_type: str = "auto",
        **options: Unpack[AnswerArguments],
    ):  # fmt: skip
        checkpoint = loaded(model, "answer")
        self.options = AnswerOptions(**options)
        self.checkpoint = prepare_for_inference(checkpoint, compute_type, device_of(device, checkpoint))

    def __call__(self, question: str, context: str) -> list[Answer]:
        """The parts of `context` that answer a question, best first. Raises TextError for an empty text or a question
        that leaves no room for its context, UsageError for a model without the head, CheckpointError for a tokenizer
        whose tokens have no places."""
        with self._lock:
            return answers_in(question, context, reader(self.checkpoint), self.options)

    def choose(self, question: str, choices: Sequence[str]) -> list[ScoredChoice]:
        """All choices, best first. Raises TextError, UsageError for a model without the head."""
        with self._lock:
            return _choices(question, checked_choices(choices), chooser(self.checkpoint))


def answer(
    question: str, context: str, model: Model | None = None, **options: Unpack[AnswererArguments]
) -> list[Answer]:
    """The answers of a new `Answerer`, whose options it takes. Each call loads the model."""
    return Answerer(model, **options)(question, context)


def reader(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. Raises UsageError unless it finds answers in a text."""
    return _with_head(checkpoint, "spans", "a model that finds answers in a text")


def chooser(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint. Raises UsageError unless it scores choices."""
    return _with_head(checkpoint, "classes", "a multiple-choice model", 1)


def _with_head(checkpoint: Checkpoint, name: str, expected: str, size: int | bool = True) -> Checkpoint:
    network = checkpoint.model
    if not isinstance(network, TextTransformer) or getattr(network.config, name) != size:
        raise UsageError(f"model {checkpoint.source}: expected {expected}, got {checkpoint.kind} without such a head")
    checkpoint.required_tokenizer()
    return checkpoint


def pair_states(network: TextTransformer, rows: Sequence[PairRow]) -> list[Float[Tensor, "_ D"]]:
    """States of each row; a model of one segment gets no second one."""
    segments = [row.segments for row in rows] if network.config.segments > 1 else None
    return encode_ragged(network, [row.ids for row in rows], segments)


@inference_mode()
def answers_in(question: str, context: str, checkpoint: Checkpoint, options: AnswerOptions) -> list[Answer]:
    """Answers by a checkpoint as it is."""
    network, most = checkpoint.model, min(options.window, checkpoint.model.config.context)
    windows = context_windows(question, context, checkpoint.tokenizer, most, options.overlap)
    states = pair_states(network, [window.row for window in windows])
    logits = [network.spans(own).float().cpu().numpy() for own in states]
    return best_answers(context, windows, logits, options)


def best_answers(
    context: str, windows: Sequence[ContextWindow], logits: Sequence[Float32[np.ndarray, "_ 2"]],
    options: AnswerOptions,
) -> list[Answer]:  # fmt: skip
    """Answers by the start and end logits of each window's row."""
    found: dict[str, Answer] = {}
    empty = 1e6
    for window, own in zip(windows, logits, strict=True):
        able = np.zeros(len(own), bool)
        able[window.first : window.first + len(window.pieces)] = True
        able[0] = True  # the first token: that there is no answer
        probabilities = np.where(able[:, None], own, -10000.0)
        probabilities = np.exp(probabilities - probabilities.max(0))
        probabilities /= probabilities.sum(0)
        empty = min(empty, float(probabilities[0].prod()))
        probabilities[0] = 0.0
        for start, end, score in _spans(probabilities, able, options):
            begin = max(window.pieces[start - window.first].word[0], window.pieces[0].start)
            stop = min(window.pieces[end - window.first].word[1], window.pieces[-1].end)
            text = context[begin:stop]
            known = found.get(text.lower())
            found[text.lower()] = (
                Answer(text, score, begin, stop) if known is None else known._replace(score=known.score + score)
            )
    answers = [*found.values(), *([Answer("", empty, 0, 0)] if options.null else [])]
    return sorted(answers, key=lambda one: -one.score)[: options.top_k]


def _spans(
    probabilities: Float32[np.ndarray, "T 2"], able: Bool[np.ndarray, "T"], options: AnswerOptions
) -> list[tuple[int, int, float]]:
    """The most probable starts and ends of at most so many tokens."""
    scores = np.triu(np.tril(np.outer(*probabilities.T), options.max_answer_tokens - 1))
    order = np.argsort(-scores, axis=None, kind="stable")[: options.top_k]
    spans = zip(*(index.tolist() for index in np.unravel_index(order, scores.shape)), strict=True)
    return [
        (start, end, float(scores[start, end]))
        for start, end in spans
        if able[start] and able[end] and scores[start, end] > 0
    ]


@inference_mode()
def choice_logits(question: str, choices: Sequence[str], checkpoint: Checkpoint) -> Float32[Tensor, "C"]:
    """Logits of choices. Raises TextError as `choice_rows` does."""
    network = checkpoint.model
    return row_logits(choice_rows(question, choices, checkpoint.required_tokenizer(), network.config.context), network)


@inference_mode()
def row_logits(rows: Sequence[PairRow], network: TextTransformer) -> Float32[Tensor, "N"]:
    """The only logit of each row."""
    pooled = [network.pooled(own[None]) for own in pair_states(network, rows)]
    return network.classes(torch.cat(pooled))[:, 0].float().cpu()


def _choices(question: str, choices: Sequence[str], checkpoint: Checkpoint) -> list[ScoredChoice]:
    if not question.strip():
        raise TextError("question: is empty")
    scores = choice_logits(question, choices, checkpoint).softmax(0).tolist()
    ranked = [
        ScoredChoice(text, score, number) for number, (text, score) in enumerate(zip(choices, scores, strict=True))
    ]
    return sorted(ranked, key=lambda one: -one.score)
