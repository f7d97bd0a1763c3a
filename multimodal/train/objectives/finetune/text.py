"""Fine-tuning a text model: classes of texts, tags of words, answers in a context, and multiple choice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from torch import nn

from multimodal.data.batching import fixed_batches
from multimodal.data.datasets.annotated.choices import ChoiceQuestions, CollateChoices, read_choices
from multimodal.data.datasets.annotated.questions import CollateAnswers, QuestionWindows, read_questions
from multimodal.data.datasets.annotated.tagged import CollateTagged, TaggedTexts, read_tagged, tags_of
from multimodal.data.datasets.labelled_texts import CollateClassed, LabelledTexts, classes_of, read_labelled
from multimodal.models.text import TextTransformer
from multimodal.system.options import Limits, Natural, Rate
from multimodal.tasks.evaluate.classification import class_figures, text_logits
from multimodal.tasks.evaluate.text.annotated import found_answers, right_choices, word_tags
from multimodal.tasks.evaluate.text.answer_scores import answer_scores, entity_scores
from multimodal.tasks.text.answer import choice_logits
from multimodal.train import log
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.heads import (
    ChooseAnswer,
    ClassifyText,
    FindAnswers,
    TagTokens,
    bag_of_words,
    with_head,
)
from multimodal.weights.folder import Checkpoint

LONGEST = {"class": 128, "tagging": 128, "qa": 384, "choice": 128}


@dataclass(frozen=True)
class AnnotatedTexts:
    """Training and held-out texts in the format of the task."""

    # class: .csv, .jsonl, or a TSV with the text first and the label last; tagging: CoNLL's columns or .jsonl; qa:
    # SQuAD's JSON or .jsonl; choice: .jsonl
    data: Path
    val: Path  # texts of the same format to measure on; they choose nothing
    task: Literal["class", "tagging", "qa", "choice"] = "class"
    columns: tuple[str, str] | None = None  # class: names of the columns of text and label (default: usual names)
    random: bool = False  # start from random weights in the architecture of --model
    longest: Annotated[int, Limits(8)] | None = None  # tokens of a row, at most the context (default: 128, of qa 384)
    overlap: Natural = 128  # qa: tokens that neighbouring windows of a long context share
    dropout: Rate = 0.1


class TextJob(NamedTuple):
    """`fresh`: the head and new parts of the model. `measure(model)` returns figures on the held-out texts,
    `mistakes(model)` some lines; `baseline`: figures of another method; `card`: facts for the checkpoint."""

    objective: Summed
    fresh: list[str]
    source: Any
    collate: Callable
    measure: Callable[[nn.Module], dict[str, float]]
    mistakes: Callable[[nn.Module], list[str]]
    card: Mapping[str, Any] = MappingProxyType({})
    baseline: Mapping[str, Any] = MappingProxyType({})


def text_job(known: Checkpoint, d: AnnotatedTexts) -> TextJob:
    """Raises CheckpointError for a model without a tokenizer, DataError for texts that do not fit."""
    longest = min(d.longest or LONGEST[d.task], getattr(known.model.config, "context", 1))
    return {"class": _classes, "tagging": _tags, "qa": _answers, "choice": _choices}[d.task](known, d, longest)


def _classes(known: Checkpoint, d: AnnotatedTexts, longest: int) -> TextJob:
    rows, tests = (read_labelled(path, d.columns) for path in (d.data, d.val))
    labels = classes_of(rows, d.data)
    kept = known.card.get("labels") == labels
    model, fresh = with_head(known, d.dropout, d.random, classes=len(labels), keep=kept)
    parts = ((rows, d.data), (tests, d.val))
    source, val = (LabelledTexts(part, known.tokenizer, labels, longest, str(path)) for part, path in parts)
    if source.cut + val.cut:
        log.warning("cut to %d tokens: %d training texts, %d others", longest, source.cut, val.cut)
    collate = CollateClassed(known.tokenizer.pad_id, longest)
    batches = fixed_batches(lambda number, _: val.read(number), collate, range(len(val)))

    def mistakes(model: nn.Module) -> list[str]:
        best = text_logits(model, val, collate).argmax(-1).tolist()
        return [f"{row.text} → {labels[i]} (is {row.label})" for row, i in zip(tests, best, strict=True)
                if labels[i] != row.label]  # fmt: skip

    measure = lambda model: dict(class_figures(model, batches))
    return TextJob(
        ClassifyText(model), fresh, source, collate, measure, mistakes, {"labels": labels, "scores": "softmax"},
        {"bag of words": bag_of_words(rows, tests)},
    )  # fmt: skip


def _tags(known: Checkpoint, d: AnnotatedTexts, longest: int) -> TextJob:
    texts, tests = read_tagged(d.data), read_tagged(d.val)
    labels = tags_of(texts, d.data)
    kept = known.card.get("labels") == labels
    model, fresh = with_head(known, d.dropout, d.random, tags=len(labels), keep=kept)
    source = TaggedTexts(texts, known.tokenizer, labels, longest)
    TaggedTexts(tests, known.tokenizer, labels, longest)  # reports unfit texts before training
    found = lambda model: word_tags(model, known.tokenizer, tests, labels)

    def mistakes(model: nn.Module) -> list[str]:
        return [
            f"{text.text} → {' '.join(tags)} (is {' '.join(text.tags)})"
            for text, tags in zip(tests, found(model), strict=True) if tags != text.tags
        ]  # fmt: skip

    measure = lambda model: entity_scores([text.tags for text in tests], found(model))
    collate = CollateTagged(known.tokenizer.pad_id, longest)
    return TextJob(TagTokens(model), fresh, source, collate, measure, mistakes, {"labels": labels})


def _answers(known: Checkpoint, d: AnnotatedTexts, longest: int) -> TextJob:
    asked, tests = read_questions(d.data), read_questions(d.val)
    model, fresh = with_head(known, d.dropout, d.random, spans=True, keep=True)
    source = QuestionWindows(asked, known.tokenizer, longest, d.overlap)
    wanted = [[one.text for one in test.answers] for test in tests]
    found = lambda model: found_answers(_as(known, model), tests)

    def mistakes(model: nn.Module) -> list[str]:
        return [
            f"{test.question} → {text or '(none)'} (is {texts[0] if texts else '(none)'})"
            for test, texts, text in zip(tests, wanted, found(model), strict=True) if text not in (texts or [""])
        ]  # fmt: skip

    measure = lambda model: answer_scores(wanted, found(model))
    collate = CollateAnswers(known.tokenizer.pad_id, longest)
    return TextJob(FindAnswers(model), fresh, source, collate, measure, mistakes)


def _choices(known: Checkpoint, d: AnnotatedTexts, longest: int) -> TextJob:
    asked, tests = read_choices(d.data), read_choices(d.val)
    model, fresh = with_head(known, d.dropout, d.random, classes=1, keep=True)
    source = ChoiceQuestions(asked, known.tokenizer, longest)
    ChoiceQuestions(tests, known.tokenizer, longest)  # reports unfit questions before training
    logits = lambda model: [choice_logits(one.question, one.choices, _as(known, model)) for one in tests]

    def mistakes(model: nn.Module) -> list[str]:
        pairs = zip(tests, (int(own.argmax()) for own in logits(model)), strict=True)
        return [f"{one.question} → {one.choices[best]} (is {one.choices[one.label]})" for one, best in pairs
                if best != one.label]  # fmt: skip

    measure = lambda model: {"accuracy": right_choices(logits(model), tests)}
    collate = CollateChoices(known.tokenizer.pad_id, longest)
    return TextJob(ChooseAnswer(model), fresh, source, collate, measure, mistakes)


def _as(known: Checkpoint, model: TextTransformer) -> Checkpoint:
    return replace(known, model=model)
