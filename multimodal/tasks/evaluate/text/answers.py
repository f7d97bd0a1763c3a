"""Answers of an any-to-text model to questions with known ones: accuracy, word error rate, CIDEr, BLEU or perplexity of
each task."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multimodal.data.datasets.class_names import words
from multimodal.data.sources import Source, SourceRow
from multimodal.errors import DataError, MultimodalError, one_line
from multimodal.system.files import is_data_url
from multimodal.tasks.ask.asker import Asker
from multimodal.tasks.evaluate.caption_scores import caption_scores
from multimodal.tasks.evaluate.scores import bleu, bleu_tokenizer, closest, error_rates, normalizer, normalizer_name
from multimodal.tokens.chat.messages import URLS, Kind

ARTICLES = {"a", "an", "the"}


@dataclass(frozen=True)
class AnsweredQuestion:
    """`references`: the answers that count as right. `loss`: of a task measured by perplexity, nats and tokens of the
    first reference. `language`: code of the answers' language, for the normalizer of word error rates and BLEU's
    tokenizer."""

    name: str
    task: str
    metric: str
    question: str
    answer: str
    references: tuple[str, ...]
    loss: tuple[float, int] | None = None
    language: str | None = None

    @property
    def right(self) -> bool:
        return plain(self.answer) in map(plain, self.references)


@dataclass(frozen=True)
class AnswerEvaluation:
    rows: list[AnsweredQuestion]
    broken: list[str]

    def figures(self) -> dict[str, dict[str, float | str | None]]:
        """Figures of each task, in %; `constant`: accuracy of the best single answer to all its questions."""
        tasks: dict[str, list[AnsweredQuestion]] = {}
        for row in self.rows:
            tasks.setdefault(row.task, []).append(row)
        return {task: {"questions": len(rows)} | METRICS[rows[0].metric](rows) for task, rows in tasks.items()}


def plain(text: str) -> str:
    """Lower-case words without articles and punctuation, which stay where nothing else is left. Combining marks and
    the signs of numbers stay."""
    text = unicodedata.normalize("NFC", text.lower()).replace("\N{MINUS SIGN}", "-")
    text = text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    kept = "".join(c if unicodedata.category(c)[0] in "LMN" or c in "_'-" else " " for c in text)
    found = re.sub(r"(?<!\s)-|-(?!\d)", " ", f" {kept}").split()
    return " ".join([word for word in found if word not in ARTICLES] or found or text.split())


def _exact(rows: Sequence[AnsweredQuestion]) -> dict[str, float]:
    likely = Counter(one for row in rows for one in set(map(plain, row.references)))
    share = lambda count: round(100 * count / len(rows), 2)
    return {"accuracy": share(sum(row.right for row in rows)), "constant": share(max(likely.values()))}


def _wer(rows: Sequence[AnsweredQuestion]) -> dict[str, float | None]:
    """Each row after the normalizer of its own language, against its closest reference."""
    names = [normalizer_name(row.language) for row in rows]
    normal = {name: normalizer(name) for name in set(names)}
    found = [normal[name](row.answer) for name, row in zip(names, rows, strict=True)]
    wanted = [closest([normal[name](one) for one in row.references], text)
              for name, row, text in zip(names, rows, found, strict=True)]  # fmt: skip
    rates = error_rates(wanted, found, names)
    return {kind: rate and round(100 * rate, 2) for kind, rate in zip(("wer", "cer"), rates, strict=True)}


def _cider(rows: Sequence[AnsweredQuestion]) -> dict[str, float | None]:
    """None for a single question, of which no word is rarer than another."""
    names = ("bleu4", "rouge_l", "cider")
    if len(rows) < 2:
        return dict.fromkeys(names)
    found = caption_scores([row.answer for row in rows], [row.references for row in rows])
    return {name: round(found[name], 2) for name in names}


def _bleu(rows: Sequence[AnsweredQuestion]) -> dict[str, float | str]:
    language = rows[0].language
    score = bleu([row.references for row in rows], [row.answer for row in rows], language)
    return {"bleu": score, "bleu_tokenizer": bleu_tokenizer(language)}


def _perplexity(rows: Sequence[AnsweredQuestion]) -> dict[str, float]:
    nats, tokens = (sum(row.loss[i] for row in rows) for i in range(2))
    return {"perplexity": round(math.exp(nats / tokens), 2)}


METRICS: dict[str, Callable[[Sequence[AnsweredQuestion]], dict[str, Any]]] = {
    "exact": _exact, "wer": _wer, "cider": _cider, "bleu": _bleu, "perplexity": _perplexity
}  # fmt: skip


def evaluate_answers(
    source: Source, asker: Asker, without: Sequence[Kind] = (), watch: Callable[[int, int], None] = lambda *_: None,
    keep: Callable[[AnsweredQuestion], None] = lambda _: None,
) -> AnswerEvaluation:  # fmt: skip
    """Ask each question of `source` (see `open_chats`); `without`: kinds of input that are left out, to see whether the
    answers used them; `keep` gets each answer as it comes. Raises DataError for an unknown metric, two metrics or two
    tokenizers of BLEU in one task, or if no question could be asked."""
    rows, broken, metrics = list[AnsweredQuestion](), list[str](), dict[str, str]()
    asked: list[tuple[SourceRow, str, str, list[dict[str, Any]]]] = []  # with task, metric and messages
    for key in range(len(source)):
        row = source.row(key)
        if row.fault:
            broken.append(f"{row.place}: {row.fault}")
            continue
        if (metric := row.fields.get("metric", "exact")) not in METRICS:
            raise DataError(f"{row.place}: unknown metric {metric!r} (known: {', '.join(METRICS)})")
        task, named = row.fields.get("task", "questions"), metric
        if metric == "bleu":
            named = f"bleu of {bleu_tokenizer(row.fields.get('language'))} tokens"
        if (first := metrics.setdefault(task, named)) != named:
            raise DataError(f"{row.place}: metric {named!r} in task {task!r}, whose other questions have {first!r}")
        if metric == "cider" and not any(map(words, row.texts)):
            broken.append(f"{row.place}: no answer has a word, which cider needs")
            continue
        asked.append((row, task, metric, [_left(message, without) for message in row.fields["messages"]]))
    found = asker.chat_many([messages for *_, messages in asked])
    for (row, task, metric, messages), answers in zip(asked, found, strict=True):
        if isinstance(answers, MultimodalError):
            broken.append(f"{row.place}: {one_line(answers)}")
        else:
            loss = asker.loss(messages, row.texts[0]) if metric == "perplexity" else None
            said = answers[0].text.strip()
            rows.append(AnsweredQuestion(
                row.place, task, metric, _asked(messages), said, tuple(row.texts), loss, row.fields.get("language")
            ))  # fmt: skip
            keep(rows[-1])
        watch(len(rows), len(asked))
    if not rows:
        raise DataError(f"{len(broken)} questions, of which none could be asked (the first: {(broken or ['none'])[0]})")
    return AnswerEvaluation(rows, broken)


def _left(message: dict[str, Any], without: Sequence[Kind]) -> dict[str, Any]:
    if isinstance(message["content"], str) or not without:
        return message
    return message | {"content": [part for part in message["content"] if _kind(part) not in without]}


def _kind(part: dict[str, Any]) -> Kind:
    return URLS.get(part["type"], part["type"])


def _asked(messages: Sequence[dict[str, Any]]) -> str:
    return " ".join(_texts(messages[-1]["content"]))


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        for part in content:
            yield part["text"] if part["type"] == "text" else f"[{_name(part)}]"


def _name(part: dict[str, Any]) -> str:
    """Path or URL of a medium; the kind of one whose content stands in the part."""
    found = next((part[key] for key in (part["type"], "path", "url") if key in part), None)
    found = found.get("url") if isinstance(found, dict) else found
    return found if isinstance(found, str) and not is_data_url(found) else _kind(part)
