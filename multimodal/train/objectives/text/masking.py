"""BERT masking: which tokens to predict, and their replacements (Devlin et al. 2019, section 3.1).

Units of masking are tokens, whole words, random spans (SpanBERT, Joshi et al. 2020) or collocations (PMI masking,
Levine et al. 2021)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.errors import UsageError, demand
from multimodal.system.options import Natural, Positive, PositiveShare, ProperShare, Share, check_limits
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.objectives.text.collocations import LONGEST, Word, collocations

Places = Sequence[int]  # of the tokens of a word or a collocation


@dataclass(frozen=True)
class MaskSettings:
    """Masking of the texts."""

    share: ProperShare = 0.15  # share of the tokens to predict
    masked: Share = 0.8  # share of those replaced by [MASK]
    random: Share = 0.1  # share of those replaced by a random token; the rest stays
    unit: Literal["tokens", "words", "spans", "pmi"] = "tokens"  # masked whole; the last span ends after a word
    geometric: PositiveShare = 0.2  # spans: chance that a span ends after each of its words
    longest_span: Positive = 10  # spans: words, at most
    collocations: Positive = 10000  # pmi: word groups with the highest pointwise mutual information in training
    often: Positive = 10  # pmi: least occurrences of a group
    ways: Natural = 0  # fixed masks per text, cycled by epoch (static masking); 0: new masks each epoch (dynamic)

    def __post_init__(self):
        check_limits(self)
        demand("masked", self.masked, self.masked + self.random <= 1, f"1 at most with random {self.random}")


def chosen_tokens(
    able: Bool[Tensor, "T"], share: float, random: torch.Generator, units: Sequence[Sequence[Places]] | None = None
) -> Bool[Tensor, "T"]:
    """Choose a `share` of the `able` tokens, at least one if there is any. With `units`, each of one or more parts,
    choose units in random order up to the same number of tokens (Google's `create_pretraining_data.py`): of one that
    is too long a random run of parts that fits. If none fits, the shortest part is chosen."""
    places = able.nonzero()[:, 0]
    count = max(1, round(share * len(places))) if len(places) else 0
    chosen = torch.zeros_like(able)
    if units is None:
        chosen[places[torch.randperm(len(places), generator=random)[:count]]] = True
        return chosen
    order = [units[number] for number in torch.randperm(len(units), generator=random).tolist()]
    for unit in order:
        starts = sum(sum(map(len, unit[at:])) >= count for at in range(len(unit)))
        for part in unit[int(torch.randint(starts, (), generator=random)) if starts > 1 else 0 :]:
            if len(part) > count:
                break
            chosen[part] = True
            count -= len(part)
    if units and not chosen.any():
        chosen[min((part for unit in order for part in unit), key=len)] = True
    return chosen


def words_of(able: Bool[Tensor, "T"], starts: Bool[Tensor, "T"]) -> list[list[int]]:
    """Places of the able tokens of each word; `starts` marks the tokens that begin one."""
    words: dict[int, list[int]] = {}
    places = able.nonzero()[:, 0]
    for place, number in zip(places.tolist(), starts.cumsum(0)[places].tolist(), strict=True):
        words.setdefault(number, []).append(place)
    return list(words.values())


def random_spans(words: Sequence[Places], s: MaskSettings, random: torch.Generator) -> list[list[Places]]:
    """Spans of neighbouring words that cover all in random order, of geometric length up to `longest_span` (SpanBERT,
    section 3.1: here spans are dealt out before their share is drawn, so that they never overlap)."""
    spans: list[list[Places]] = []
    left = 0
    for before, word in zip([[-1], *words], words, strict=False):
        if left == 0 or word[0] != before[-1] + 1:
            drawn = torch.empty((), dtype=torch.float64).geometric_(s.geometric, generator=random)
            left = min(int(drawn), s.longest_span)
            spans.append([])
        spans[-1].append(word)
        left -= 1
    return spans


def grouped(words: Sequence[Sequence[int]], ids: Sequence[int], known: Collection[tuple[Word, ...]]) -> list[list[int]]:
    """Join neighbouring words that are a collocation, the longest first from the left."""
    units: list[list[int]] = []
    spelled, at = [tuple(ids[place] for place in word) for word in words], 0
    while at < len(words):
        sizes = range(min(LONGEST, len(words) - at), 1, -1)
        beside = lambda size: words[at + size - 1][-1] - words[at][0] + 1 == sum(map(len, words[at : at + size]))  # noqa: B023
        size = next((n for n in sizes if tuple(spelled[at : at + n]) in known and beside(n)), 1)
        units.append([place for word in words[at : at + size] for place in word])
        at += size
    return units


class Masker:
    """Masks texts of one tokenizer. Control tokens and unknown words are neither predicted nor used as replacements.

    Raises UsageError for a tokenizer without a mask token, or one without word starts if whole words are masked."""

    def __init__(self, tokenizer: Tokenizer, settings: MaskSettings):
        for name in ("mask_id", "bos_id", "eos_id"):
            if getattr(tokenizer, name) is None:
                raise UsageError(f"has no {name}, which masking needs", argument="tokenizer")
        self.tokenizer, self.settings = tokenizer, settings
        ordinary = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
        unknown = tokenizer.unknown_id
        ordinary[[*tokenizer.control, tokenizer.mask_id, *([] if unknown is None else [unknown])]] = False
        self.ordinary, self.starts = ordinary, None
        self.known: set[tuple[Word, ...]] = set()
        if settings.unit != "tokens":
            if not hasattr(tokenizer, "vocab"):
                cause = f"{settings.unit}: needs a tokenizer that marks word starts, such as WordPiece"
                raise UsageError(cause, argument="unit")
            self.starts = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
            self.starts[[i for i, token in enumerate(tokenizer.vocab) if token.startswith("##")]] = False

    def learn(self, texts: Iterable[Sequence[int]]) -> None:
        """Find the collocations of texts, given as ids, if they are the units. Raises UsageError without any."""
        if self.settings.unit != "pmi":
            return
        rows = (torch.tensor(ids) for ids in texts)
        words = ([tuple(ids[place].item() for place in word) for word in self._words(ids)] for ids in rows)
        self.known = collocations(words, self.settings.collocations, self.settings.often)
        if not self.known:
            raise UsageError(f"{self.settings.often}: no group of words occurs so often", argument="often")

    def _words(self, ids: Int[Tensor, "T"]) -> list[list[int]]:
        return words_of(self.ordinary[ids], self.starts[ids])

    def _units(self, ids: Int[Tensor, "T"], random: torch.Generator) -> list[list[Places]] | None:
        if self.settings.unit == "tokens":
            return None
        words = self._words(ids)
        if self.settings.unit == "spans":
            return random_spans(words, self.settings, random)
        return [[one] for one in (grouped(words, ids.tolist(), self.known) if self.settings.unit == "pmi" else words)]

    def __call__(
        self, ids: Int[Tensor, "T"], random: torch.Generator
    ) -> tuple[Int[Tensor, "T"], Bool[Tensor, "T"], Float[Tensor, "N"]]:
        """Return the masked text, the chosen tokens, and for each of those a number from 0 to 1 to draw a replacement
        with."""
        s = self.settings
        chosen = chosen_tokens(self.ordinary[ids], s.share, random, self._units(ids, random))
        kind, draws = torch.rand(2, int(chosen.sum()), generator=random)
        others = self.ordinary.nonzero()[:, 0]
        other = others[torch.randint(len(others), (len(kind),), generator=random)]
        shown = torch.where(kind < s.masked + s.random, other, ids[chosen])
        read = ids.clone()
        read[chosen] = torch.where(kind < s.masked, self.tokenizer.mask_id, shown)
        return read, chosen, draws
