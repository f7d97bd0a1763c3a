"""GPT-2's zero-shot evaluations (Radford et al. 2019, section 3): last words, cloze choices, pronouns."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.data.batching import map_tensors, pad_rows
from multimodal.data.datasets.annotated.rows import AnnotatedRow, json_rows, not_empty
from multimodal.data.datasets.text import IGNORED, TokenBatch, ends_of, texts_in
from multimodal.data.manifests import is_json
from multimodal.errors import DataError, TextError
from multimodal.inference.modules import inference_mode
from multimodal.system.files import shown
from multimodal.tasks.evaluate.perplexity import causal_model, mask_of, places_of
from multimodal.tasks.text.choices import continuation_ids
from multimodal.weights.encode import evaluating
from multimodal.weights.folder import Checkpoint

BATCH = 16  # continuations
BLANK = re.compile(r"(?<!\w)_+(?!\w)")


class ScoredContinuation(NamedTuple):
    """Tokens after a text: summed log-probability, whether each is the most probable one, how many, and whether the
    text before them was cut from the left."""

    logprob: float
    greedy: bool
    tokens: int
    cut: bool


class ClozeItem(NamedTuple):
    """A text with a blank: what stands before and after it, what may fill it, and the number of the right choice."""

    before: str
    after: str
    choices: list[str]
    answer: int


class Scorer:
    """Log-probabilities of a causal or prefix language model, in windows of `context` tokens."""

    def __init__(self, checkpoint: Checkpoint, context: int | None = None):
        self.model, self.context = causal_model(checkpoint, context)
        self.tokenizer, self.prefix = checkpoint.tokenizer, checkpoint.card.get("objective") == "prefix"
        self.first = ends_of(self.tokenizer)[0]

    @inference_mode()
    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[ScoredContinuation]:
        """Score the second text of each pair after the first. Raises TextError for one that is empty, or is longer than
        the context."""
        rows = [self._row(*pair) for pair in pairs]
        found: dict[int, ScoredContinuation] = {}
        order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))  # rows of a batch are about as long
        for at in range(0, len(order), BATCH):
            part = order[at : at + BATCH]
            with evaluating(self.model):
                found |= zip(part, self._scored([rows[number] for number in part]), strict=True)
        return [found[number] for number in range(len(rows))]

    def _row(self, before: str, after: str) -> tuple[list[int], int, bool]:
        """The last tokens that fit, how many of them are scored, and whether others were cut."""
        head, tail = continuation_ids(self.tokenizer, before, after)
        if not tail or len(tail) > self.context:
            raise TextError(f"{after[:40]!r} has {len(tail)} tokens, expected 1 to the context of {self.context}")
        ids = [self.first, *head, *tail]
        return ids[-self.context - 1 :], len(tail), len(ids) > self.context + 1

    def _scored(self, rows: Sequence[tuple[list[int], int, bool]]) -> list[ScoredContinuation]:
        ids = [torch.tensor(row[:-1]) for row, _, _ in rows]
        targets = [torch.tensor([IGNORED] * (len(row) - 1 - tail) + row[len(row) - tail :]) for row, tail, _ in rows]
        given = [torch.arange(len(row) - 1) < len(row) - tail for row, tail, _ in rows]
        batch = TokenBatch(
            pad_rows(ids, multiple=1), pad_rows(targets, IGNORED, multiple=1),
            given=pad_rows(given, False, multiple=1) if self.prefix else None,
        )  # fmt: skip
        batch = map_tensors(batch, lambda tensor: tensor.to(self.model.device))
        mask, places = mask_of(batch, self.model.config.window), places_of(batch, self.model.config.positions)
        states = self.model.states(batch.ids, mask=mask, positions=places)
        return [
            self._continuation(state[target != IGNORED], target[target != IGNORED], cut)
            for state, target, (_, _, cut) in zip(states, batch.targets, rows, strict=True)
        ]

    def _continuation(self, states: Tensor, targets: Tensor, cut: bool) -> ScoredContinuation:
        logits = self.model.logits(states[None])[0].float()
        each = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].double()
        return ScoredContinuation(float(each.sum()), bool((logits.argmax(-1) == targets).all()), len(targets), cut)


def last_word(checkpoint: Checkpoint, path: Path, context: int | None = None) -> dict[str, Any]:
    """LAMBADA's task (Paperno et al. 2016): the last word of each passage. `accuracy`: all of its tokens are the most
    probable ones; `perplexity`: per word. Passages are lines of a text, or "text" of JSON lines. Raises DataError."""
    score, passages = Scorer(checkpoint, context), _passages(path)
    pairs = []
    for place, passage in passages:
        before, _, word = passage.rstrip().rpartition(" ")
        if not before.strip():
            raise DataError(f"{place}: expected two words or more (got {passage[:40]!r})")
        pairs.append((before, f" {word}"))
    found = score(pairs)
    return {
        "passages": len(found), "accuracy": mean(one.greedy for one in found),
        "perplexity": math.exp(min(-mean(one.logprob for one in found), 700.0)), "cut": sum(one.cut for one in found),
    }  # fmt: skip


def cloze(checkpoint: Checkpoint, path: Path, context: int | None = None) -> dict[str, Any]:
    """Choices for a blank (Hill et al. 2016, Zellers et al. 2019), by the log-probability of the choice and what
    follows it; `accuracy_per_byte`: divided by their bytes. Raises DataError."""
    items = read_cloze(path)
    found = _scored_items(Scorer(checkpoint, context), items, lambda item, choice: (item.before, choice + item.after))
    sizes = [[len((choice + item.after).encode()) for choice in item.choices] for item in items]
    per_byte = [
        [one.logprob / size for one, size in zip(*pair, strict=True)] for pair in zip(found, sizes, strict=True)
    ]
    return _figures(items, found) | {"accuracy_per_byte": _accuracy(items, per_byte)}


def winograd(checkpoint: Checkpoint, path: Path, context: int | None = None) -> dict[str, Any]:
    """Whom a pronoun means (Levesque et al. 2012), by the log-probability of what follows the blank, given each choice
    in it: Trinh and Le's (2018) partial score. `accuracy_full`: of the choice too. Raises DataError."""
    items = read_cloze(path)
    if bare := next((number for number, item in enumerate(items, 1) if not item.after.strip()), 0):
        raise DataError(f"{path}: item {bare}: expected text after the blank")
    score = Scorer(checkpoint, context)
    found = _scored_items(score, items, lambda item, choice: (item.before + choice, item.after))
    full = _scored_items(score, items, lambda item, choice: (item.before, choice + item.after))
    return _figures(items, found) | {"accuracy_full": _accuracy(items, [[one.logprob for one in row] for row in full])}


TASKS = {"last-word": last_word, "cloze": cloze, "winograd": winograd}


def _scored_items(score: Scorer, items: list[ClozeItem], pair: Any) -> list[list[ScoredContinuation]]:
    found = iter(score([pair(item, choice) for item in items for choice in item.choices]))
    return [[next(found) for _ in item.choices] for item in items]


def _accuracy(items: list[ClozeItem], scores: list[list[float]]) -> float:
    """Share of items whose right choice alone has the highest score."""
    return mean(
        row[item.answer] > max(score for number, score in enumerate(row) if number != item.answer)
        for item, row in zip(items, scores, strict=True)
    )


def _figures(items: list[ClozeItem], found: list[list[ScoredContinuation]]) -> dict[str, Any]:
    return {
        "items": len(items), "accuracy": _accuracy(items, [[one.logprob for one in row] for row in found]),
        "chance": mean(1 / len(item.choices) for item in items), "cut": sum(one.cut for row in found for one in row),
    }  # fmt: skip


def _passages(path: Path) -> list[tuple[str, str]]:
    """Place and text of each."""
    if not is_json(path):
        lines = ((number, line) for number, line in enumerate("\n".join(texts_in(path)).split("\n"), 1))
        return [(f"{path}: line {number}", line) for number, line in lines if line.strip()]
    found = [(row.where, row.text("text")) for row in json_rows(path)]
    not_empty(found, path)
    return found


def read_cloze(path: Path) -> list[ClozeItem]:
    """JSON lines with "text" (a blank `_`, or the choices stand at its end), "choices", and "answer", a number from 0
    or the text of a choice. Raises DataError that names the line."""
    found = [_item(row) for row in json_rows(path)]
    not_empty(found, path)
    return found


def _item(row: AnnotatedRow) -> ClozeItem:
    place, text, choices, answer = row.where, row.text("text"), row.values.get("choices"), row.values.get("answer")
    fine = isinstance(choices, list) and all(isinstance(choice, str) and choice.strip() for choice in choices)
    if not fine or len(choices) < 2 or len(set(choices)) < len(choices):
        raise DataError(f"{place}: expected two or more different texts in 'choices' (got {shown(choices)})")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise DataError(f"{place}: expected 0 to {len(choices) - 1} or a choice in 'answer' (got {shown(answer)})")
    blanks = list(BLANK.finditer(text))
    if len(blanks) > 1:
        raise DataError(f"{place}: expected one blank _ (got {len(blanks)})")
    before, after = (text[: blanks[0].start()], text[blanks[0].end() :]) if blanks else (text, "")
    space = " " if before.strip() and (before != before.rstrip() or not blanks) else ""
    return ClozeItem(before.rstrip(), after, [space + choice.strip() for choice in choices], answer)
