"""Multiple-choice questions: JSON lines, and the rows of question and choice for a model that scores them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from multimodal.data.batching import PaddedText
from multimodal.data.datasets.annotated.questions import padded_pairs
from multimodal.data.datasets.annotated.rows import json_rows, not_empty
from multimodal.data.examples import SizedExamples
from multimodal.errors import DataError
from multimodal.system.files import shown
from multimodal.tokens.text.pieces import PairRow, choice_rows
from multimodal.tokens.text.tokenizer import Tokenizer


class ChoiceQuestion(NamedTuple):
    """`label`: number of the right choice, from 0. `where`: file and line."""

    question: str
    choices: list[str]
    label: int
    where: str


def read_choices(path: Path) -> list[ChoiceQuestion]:
    """Questions of JSON lines with "question", "choices" (equally many in each) and "label", the right one's number.
    Raises DataError naming the line."""
    found: list[ChoiceQuestion] = []
    for row in json_rows(path):
        question, choices, label = row.text("question"), row.texts("choices"), row.values.get("label")
        if len(choices) < 2:
            raise DataError(f"{row.where}: has {len(choices)} choices, expected at least two")
        if found and len(choices) != (count := len(found[0].choices)):
            raise DataError(f"{row.where}: has {len(choices)} choices, those before it have {count}")
        if type(label) is not int or not 0 <= label < len(choices):
            raise DataError(f"{row.where}: label must be a number from 0 to {len(choices) - 1} (got {shown(label)})")
        found.append(ChoiceQuestion(question, choices, label, row.where))
    not_empty(found, path)
    return found


class ChoiceExample(NamedTuple):
    rows: list[PairRow]
    label: int


@dataclass(frozen=True)
class ChoiceBatch(PaddedText):
    """B rows of Q questions with as many choices each; those of a question are neighbours."""

    segments: Int[Tensor, "B T"]
    labels: Int[Tensor, "Q"]


class ChoiceQuestions(SizedExamples[ChoiceExample]):
    """Multiple-choice questions as the loader's source. Raises TextError for a pair beyond the context."""

    def __init__(self, questions: Sequence[ChoiceQuestion], tokenizer: Tokenizer, context: int):
        examples = [
            ChoiceExample(choice_rows(one.question, one.choices, tokenizer, context), one.label) for one in questions
        ]
        sizes = [len(one.rows) * max(len(row.ids) for row in one.rows) for one in examples]
        super().__init__(examples, sizes, "question")


@dataclass(frozen=True)
class CollateChoices:
    """`context`: limit of the padded length."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[ChoiceExample]) -> ChoiceBatch:
        text, segments = padded_pairs([row for one in examples for row in one.rows], self.pad_id, self.context)
        return ChoiceBatch(text.ids, text.lengths, segments, torch.tensor([one.label for one in examples]))
