"""Figures of models that tag words, find answers or choose them, on annotated texts."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from multimodal.data.datasets.annotated.choices import ChoiceQuestion, read_choices
from multimodal.data.datasets.annotated.questions import Question, read_questions
from multimodal.data.datasets.annotated.tagged import OUTSIDE, TaggedText, first_pieces, read_tagged
from multimodal.data.datasets.class_names import evenly
from multimodal.errors import DataError
from multimodal.models.text import TextTransformer
from multimodal.tasks.evaluate.text.answer_scores import answer_scores, entity_scores
from multimodal.tasks.text.answer import answers_in, choice_logits, chooser, reader
from multimodal.tasks.text.options import AnswerOptions
from multimodal.tasks.text.tag import tag_logits, tagger
from multimodal.tokens.text.pieces import overlapping
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint


def evaluate_tagging(checkpoint: Checkpoint, data: Path, limit: int | None = None) -> dict[str, float]:
    """`entity_scores` of a token classifier on tagged texts (see `read_tagged`). `limit`: at most this many texts,
    evenly spread. Raises UsageError for another model, CheckpointError without labels, DataError for data that do not
    fit."""
    labels = tagger(checkpoint).card["labels"]
    texts = list(evenly(read_tagged(data), limit))
    if unknown := sorted({tag for text in texts for tag in text.tags} - set(labels)):
        raise DataError(f"{data}: tag {unknown[0]!r:.40} is not among the model's ({', '.join(labels)})")
    found = word_tags(checkpoint.model, checkpoint.tokenizer, texts, labels)
    return {"texts": len(texts), **entity_scores([text.tags for text in texts], found)}


def evaluate_questions(checkpoint: Checkpoint, data: Path, limit: int | None = None) -> dict[str, float]:
    """Exact match and F1 of a model that finds answers (see `read_questions`). Where some questions have none, the
    model may answer so. Raises as `evaluate_tagging` does."""
    reader(checkpoint)
    questions = list(evenly(read_questions(data), limit))
    figures = answer_scores(
        [[known.text for known in one.answers] for one in questions], found_answers(checkpoint, questions)
    )
    return {"questions": len(questions), **figures}


def found_answers(checkpoint: Checkpoint, questions: Sequence[Question]) -> list[str]:
    """The best answer to each question, "" for none."""
    options = AnswerOptions(null=any(not one.answers for one in questions), max_answer_tokens=30)
    best = (answers_in(one.question, one.context, checkpoint, options) for one in questions)
    return [found[0].text if found else "" for found in best]


def evaluate_choices(checkpoint: Checkpoint, data: Path, limit: int | None = None) -> dict[str, float]:
    """Accuracy of a multiple-choice model (see `read_choices`). Raises as `evaluate_tagging` does."""
    chooser(checkpoint)
    questions = list(evenly(read_choices(data), limit))
    logits = [choice_logits(one.question, one.choices, checkpoint) for one in questions]
    return {"questions": len(questions), "accuracy": right_choices(logits, questions)}


def right_choices(logits: Sequence[Tensor], questions: Sequence[ChoiceQuestion]) -> float:
    """Share of the questions whose right choice has the highest logit."""
    return sum(int(own.argmax()) == one.label for own, one in zip(logits, questions, strict=True)) / len(questions)


def word_tags(
    network: TextTransformer, tokenizer: Tokenizer, texts: Sequence[TaggedText], labels: Sequence[str]
) -> list[list[str]]:
    """The tag of each word, by its first token; a word without tokens has that of no entity."""
    room = network.config.context - sum(map(len, tokenizer.frame))
    pieces = [tokenizer.pieces(text.text) for text in texts]
    windows = [overlapping(len(own), room, 0) for own in pieces]
    rows = [[piece.id for piece in own[a:b]] for own, parts in zip(pieces, windows, strict=True) for a, b in parts]
    logits, found = iter(tag_logits(network, tokenizer, rows)), []
    for text, own, parts in zip(texts, pieces, windows, strict=True):
        best = torch.cat([next(logits) for _ in parts]).argmax(-1).tolist()
        named = dict(zip(first_pieces(text, own), best, strict=True))
        found.append([labels[named[word]] if word in named else OUTSIDE for word in range(len(text.words))])
    return found
