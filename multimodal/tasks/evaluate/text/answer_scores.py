"""Scores of entities as conlleval and seqeval count them, and of answers as SQuAD's script does."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from multimodal.data.datasets.annotated.tagged import OUTSIDE

MARKS = ("B-", "I-", "E-", "S-", "L-", "U-")
ARTICLES = re.compile(r"\b(a|an|the)\b")


class EntitySpan(NamedTuple):
    """Words `start` to `end`, exclusive."""

    label: str
    start: int
    end: int


def spans_of(tags: Sequence[str]) -> set[EntitySpan]:
    """Entities of a sequence of tags of IOB2, IOBES or BILOU. A tag after another label, or after an entity's last
    word, begins one, as B- does (seqeval's default mode)."""
    found: set[EntitySpan] = set()
    begun, kind, closed = 0, "", False
    for number, tag in enumerate([*tags, OUTSIDE]):
        mark, _, label = tag.partition("-") if tag[:2] in MARKS else ("I", "", "" if tag == OUTSIDE else tag)
        if mark in "BSU" or closed or label != kind:
            if kind:
                found.add(EntitySpan(kind, begun, number))
            begun, kind = number, label
        closed = mark in "ESLU"
    return found


def entity_scores(wanted: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> dict[str, float]:
    """Micro-averaged precision, recall and F1 of whole entities, F1 of each label, and the share of right tags."""
    pairs = [(spans_of(a), spans_of(b)) for a, b in zip(wanted, found, strict=True)]
    kinds = sorted({span.label for span in chain.from_iterable(a | b for a, b in pairs)})
    tags = [a == b for row in zip(wanted, found, strict=True) for a, b in zip(*row, strict=True)]
    figures = _figures(pairs)
    figures |= {f"f1 of {kind}": _figures([tuple({s for s in side if s.label == kind} for side in pair)
                                           for pair in pairs])["f1"] for kind in kinds}  # fmt: skip
    return figures | {"accuracy": sum(tags) / max(1, len(tags))}


def _figures(pairs: Sequence[tuple[set[EntitySpan], ...]]) -> dict[str, float]:
    right = sum(len(a & b) for a, b in pairs)
    precision = right / max(1, sum(len(b) for _, b in pairs))
    recall = right / max(1, sum(len(a) for a, _ in pairs))
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / max(precision + recall, 1e-12)}


def normalized(text: str) -> str:
    """Lower case without punctuation, articles and extra blanks."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", plain).split())


def answer_scores(wanted: Sequence[Sequence[str]], found: Sequence[str]) -> dict[str, float]:
    """Exact match and mean F1 over words, each against the best of a question's answers, as shares. Answers without
    a word do not count; the answer to a question without one is "" (Rajpurkar et al. 2018)."""
    pairs = [(list(filter(None, map(normalized, texts))) or [""], normalized(text))
             for texts, text in zip(wanted, found, strict=True)]  # fmt: skip
    count = max(1, len(pairs))
    exact = sum(text in texts for texts, text in pairs) / count
    return {"exact": exact, "f1": sum(max(_words_f1(one, text) for one in texts) for texts, text in pairs) / count}


def _words_f1(wanted: str, found: str) -> float:
    a, b = wanted.split(), found.split()
    if not a or not b:
        return float(a == b)
    return 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))
