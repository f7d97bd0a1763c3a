"""Questions about texts: SQuAD's files or JSON lines, and their windows for a model that finds answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from multimodal.data.batching import PaddedText, pad_rows, pad_text
from multimodal.data.datasets.annotated.rows import AnnotatedRow, json_rows, not_empty
from multimodal.data.examples import SizedExamples
from multimodal.data.manifests import read_text
from multimodal.errors import DataError
from multimodal.system.files import shown, strict_json
from multimodal.tokens.text.pieces import PairRow, context_windows
from multimodal.tokens.text.tokenizer import Tokenizer


class KnownAnswer(NamedTuple):
    text: str
    start: int  # character of the context


class Question(NamedTuple):
    """`answers`: none for a question that the context does not answer. `where`: file and line, or file and id."""

    question: str
    context: str
    answers: list[KnownAnswer]
    where: str


def read_questions(path: Path) -> list[Question]:
    """Questions of SQuAD's JSON (Rajpurkar et al. 2016, 2018), or of JSON lines with "question", "context" and
    "answers": a list of objects with "text" and "answer_start", or one object with lists of both.

    Raises DataError naming line or id: an answer that is not in the context where it should be, a missing field, no
    question."""
    text = read_text(path)
    try:
        whole = strict_json(text.encode())
    except ValueError:
        whole = None  # JSON lines
    if isinstance(whole, dict) and "data" in whole:
        rows = list(_articles(path, whole["data"]))
    else:
        rows = [_question(row.text("question"), row.text("context"), row) for row in json_rows(path)]
    not_empty(rows, path)
    return rows


def _articles(path: Path, articles: Any) -> Iterator[Question]:
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    row = AnnotatedRow(f"{path}: question {shown(asked.get('id'))}", asked)
                    context = AnnotatedRow(row.where, paragraph).text("context")
                    yield _question(row.text("question"), context, row)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: is not in SQuAD's format ({error!r:.60})") from None


def _question(question: str, context: str, row: AnnotatedRow) -> Question:
    found = row.values.get("answers", [])
    if isinstance(found, dict):  # lists of both
        texts, starts = found.get("text"), found.get("answer_start")
        fine = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
        found = [dict(zip(("text", "answer_start"), pair, strict=True)) for pair in zip(texts, starts, strict=True)] \
            if fine else None  # fmt: skip
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(
            f"{row.where}: answers must have text and answer_start (got {shown(row.values.get('answers'))})"
        )
    answers = []
    for one in found:
        text, start = AnnotatedRow(row.where, one).text("text"), one.get("answer_start")
        if type(start) is not int or start < 0 or start >= len(context):
            size = f"{len(context)} characters"
            raise DataError(f"{row.where}: answer {text[:40]!r} begins outside the context of {size} ({shown(start)})")
        if (written := context[start : start + len(text)]) != text:
            cut = (
                "is cut by the end of the context" if start + len(text) > len(context) else f"is {written[:40]!r} there"
            )
            raise DataError(f"{row.where}: answer {text[:40]!r} at character {start} {cut}")
        answers.append(KnownAnswer(text, start))
    return Question(question, context, answers, row.where)


class AnswerExample(NamedTuple):
    """`start`, `end`: first and last token of the answer; 0, the first token of the row, where it has none."""

    ids: list[int]
    segments: list[int]
    start: int
    end: int


@dataclass(frozen=True)
class AnswerBatch(PaddedText):
    segments: Int[Tensor, "B T"]
    starts: Int[Tensor, "B"]
    ends: Int[Tensor, "B"]


class QuestionWindows(SizedExamples[AnswerExample]):
    """Questions as the loader's source: an example for each window of a context, with its first known answer where the
    window has it (Devlin et al. 2019, section 4.2). Raises TextError for a question that leaves no room, DataError for
    an answer that all windows cut."""

    def __init__(self, questions: Sequence[Question], tokenizer: Tokenizer, context: int, overlap: int):
        examples: list[AnswerExample] = []
        for one in questions:
            cut = bool(one.answers)
            for window in context_windows(one.question, one.context, tokenizer, context, overlap):
                start = end = 0
                if one.answers:
                    text, first = one.answers[0]
                    first, last = first + len(text) - len(text.lstrip()), first + len(text.rstrip())
                    inside = [at for at, piece in enumerate(window.pieces) if piece.start < last and piece.end > first]
                    whole = inside and window.pieces[0].start <= first and window.pieces[-1].end >= last
                    if whole:
                        start, end, cut = window.first + inside[0], window.first + inside[-1], False
                examples.append(AnswerExample(*window.row, start, end))
            if cut:
                text = one.answers[0].text
                raise DataError(f"{one.where}: answer {text[:40]!r} is cut in each window of {context} tokens")
        super().__init__(examples, [len(one.ids) for one in examples], "window")


@dataclass(frozen=True)
class CollateAnswers:
    """`context`: limit of the padded length."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[AnswerExample]) -> AnswerBatch:
        text, segments = padded_pairs([PairRow(*one[:2]) for one in examples], self.pad_id, self.context)
        starts, ends = (torch.tensor([getattr(one, name) for one in examples]) for name in ("start", "end"))
        return AnswerBatch(text.ids, text.lengths, segments, starts, ends)


def padded_pairs(rows: Sequence[PairRow], pad_id: int, context: int) -> tuple[PaddedText, Int[Tensor, "B T"]]:
    text = pad_text([row.ids for row in rows], pad_id, limit=context)
    return text, pad_rows([row.segments for row in rows], limit=context)
