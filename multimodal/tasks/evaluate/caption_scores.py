"""Scores of captions against several references: BLEU-1 to BLEU-4 (Papineni et al. 2002), ROUGE-L (Lin 2004) and
CIDEr-D (Vedantam et al. 2015).

Where the papers leave a choice, it is that of coco-caption, so that its users can compare: see `_bleu`, `_rouge` and
`References`. Its words are those of Stanford's PTBTokenizer, a Java program, whose place a rule takes here (`words`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from rapidfuzz.distance import LCSseq

from multimodal.data.datasets.class_names import words
from multimodal.errors import DataError

MOST = 4  # words of the longest n-grams
SIGMA = 6.0  # of CIDEr-D's penalty for a difference in length
BETA = 1.2  # how much more ROUGE-L's recall weighs than its precision

Ngram = tuple[str, ...]


class CaptionScores(NamedTuple):
    """`total`: of all images together; `each`: of each. In %, CIDEr-D 100 for what coco-caption calls 1."""

    total: dict[str, float]
    each: list[dict[str, float]]


class _NgramVector(NamedTuple):
    """Its n-grams by n, weighted by their rarity, the lengths of these four vectors, and its number of words."""

    weights: list[dict[Ngram, float]]
    norms: list[float]
    words: int


class References:
    """Reference captions of two or more images, prepared for scoring.

    A word's rarity is log(images / images whose references have it). Raises DataError where there are fewer than
    two images, since then no word tells anything, or where an image has no reference."""

    def __init__(self, references: Sequence[Sequence[str]]):
        if len(references) < 2:
            raise DataError(f"captions to score: for {len(references)} images, two or more are needed")
        self.texts = [[words(text).split() for text in own] for own in references]
        if bare := [i for i, own in enumerate(self.texts) if not any(own)]:
            raise DataError(f"captions to score: image {bare[0]} has no reference")
        counts = [[_ngrams(text) for text in own] for own in self.texts]
        self._most = [_union(own) for own in counts]
        self._all = math.log(len(references))
        seen = Counter(ngram for own in self._most for ngram in own)
        self._rarity = {ngram: self._all - math.log(images) for ngram, images in seen.items()}
        self._weighted = [[self._text(text) for text in own] for own in counts]

    def score(self, captions: Sequence[str]) -> CaptionScores:
        """One caption an image, in their order. Raises DataError for another number of captions."""
        if len(captions) != len(self.texts):
            raise DataError(f"captions to score: {len(captions)} for {len(self.texts)} images")
        said = [words(text).split() for text in captions]
        parts = [_bleu_parts(text, own, most) for text, own, most in zip(said, self.texts, self._most, strict=True)]
        each = [
            {**_bleu(part), "rouge_l": 100 * _rouge(text, own), "cider": self._cider(i, text)}
            for i, (text, own, part) in enumerate(zip(said, self.texts, parts, strict=True))
        ]
        means = {name: math.fsum(row[name] for row in each) / len(each) for name in ("rouge_l", "cider")}
        return CaptionScores(_bleu([sum(column) for column in zip(*parts, strict=True)]) | means, each)

    def _text(self, counts: Counter[Ngram]) -> _NgramVector:
        weights: list[dict[Ngram, float]] = [{} for _ in range(MOST)]
        for ngram, count in counts.items():
            weights[len(ngram) - 1][ngram] = count * self._rarity.get(ngram, self._all)
        norms = [math.sqrt(sum(weight**2 for weight in own.values())) for own in weights]
        return _NgramVector(weights, norms, sum(count for ngram, count in counts.items() if len(ngram) == 1))

    def _cider(self, image: int, text: list[str]) -> float:
        """The mean over n of 1 to 4 and over the references of the cosine of the n-grams' vectors, where a word said
        more often than in the reference counts no more, times a Gaussian of the difference in length (in words)."""
        said, score = self._text(_ngrams(text)), 0.0
        for wanted in self._weighted[image]:
            like = 0.0
            for own, theirs, *norms in zip(said.weights, wanted.weights, said.norms, wanted.norms, strict=True):
                if all(norms):
                    shared = (min(weight, theirs[n]) * theirs[n] for n, weight in own.items() if n in theirs)
                    like += sum(shared) / math.prod(norms)
            score += like * math.exp(-((said.words - wanted.words) ** 2) / (2 * SIGMA**2))
        return 100 * 10 * score / MOST / len(self._weighted[image])


def _ngrams(text: list[str]) -> Counter[Ngram]:
    return Counter(tuple(text[i : i + n]) for n in range(1, MOST + 1) for i in range(len(text) - n + 1))


def _union(counts: Sequence[Counter[Ngram]]) -> Counter[Ngram]:
    """Each n-gram as often as the text has it that has it most."""
    found: Counter[Ngram] = Counter()
    for own in counts:
        found |= own
    return found


def _bleu_parts(text: list[str], references: list[list[str]], most: Counter[Ngram]) -> list[int]:
    """Matches of 1 to 4 words, how many there could be, the length, and the closest reference's (of two the
    shorter)."""
    matches = [0] * MOST
    for ngram, count in _ngrams(text).items():
        matches[len(ngram) - 1] += min(count, most[ngram])
    possible = [max(0, len(text) - n) for n in range(MOST)]
    closest = min((abs(len(own) - len(text)), len(own)) for own in references)[1]
    return [*matches, *possible, len(text), closest]


def _bleu(parts: Sequence[int]) -> dict[str, float]:
    """BLEU-1 to BLEU-4 in %. The small numbers are coco-caption's: a caption without any match of four words has a
    BLEU-4 a little above 0."""
    matches, possible, (length, wanted) = parts[:MOST], parts[MOST : 2 * MOST], parts[2 * MOST :]
    ratio = (length + 1e-15) / (wanted + 1e-9)
    brevity = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    precision, found = 1.0, {}
    for n in range(MOST):
        precision *= (matches[n] + 1e-15) / (possible[n] + 1e-9)
        found[f"bleu{n + 1}"] = 100 * brevity * precision ** (1 / (n + 1))
    return found


def _rouge(text: list[str], references: list[list[str]]) -> float:
    """F of the best precision and the best recall, which may be two references'."""
    common = [(LCSseq.similarity(text, own), len(own)) for own in references if own]
    if not text or not any(shared for shared, _ in common):
        return 0.0
    precision = max(shared for shared, _ in common) / len(text)
    recall = max(shared / length for shared, length in common)
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def caption_scores(captions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """`bleu1` to `bleu4`, `rouge_l` and `cider` of one caption an image, in % (`CaptionScores`). Raises DataError."""
    return References(references).score(captions).total


def agreement(references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Human score: each reference in turn against the others, averaged. As many turns as the
    image with the fewest references has; each image is scored against all its others."""
    turns = min(len(own) for own in references)
    if turns < 2:
        raise DataError("agreement: an image has one reference only")
    found = [
        caption_scores([own[i] for own in references], [[*own[:i], *own[i + 1 :]] for own in references])
        for i in range(turns)
    ]
    return {name: sum(row[name] for row in found) / turns for name in found[0]}


def best_constant(candidates: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The caption that does best when every image is given the same: its CIDEr-D, the other scores and `text`. Of the
    candidates the 100 whose words are most like those of the references (Jaccard index, the mean) are scored."""
    wanted = References(references)
    bags = [set(text) for own in wanted.texts for text in own]
    own = [(set(words(text).split()), text) for text in dict.fromkeys(candidates)]
    near = sorted(own, key=lambda pair: -sum(len(pair[0] & bag) / len(pair[0] | bag) for bag in bags if bag))[:100]
    found = [wanted.score([text] * len(references)).total | {"text": text} for _, text in near]
    return max(found, key=lambda row: row["cider"])
