"""BERT masking: which tokens to predict, and their replacements (Devlin et al. 2019, section 3.1)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.errors import UsageError, at_least, demand
from multimodal.tokens.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class MaskSettings:
    """Masking of the texts."""

    share: float = 0.15  # share of the tokens to predict
    masked: float = 0.8  # share of those replaced by [MASK]
    random: float = 0.1  # share of those replaced by a random token; the rest stays
    whole_words: bool = False  # mask all tokens of a word or none
    ways: int = 0  # fixed masks per text, cycled by epoch (static masking); 0: new masks each epoch (dynamic)

    def __post_init__(self):
        demand("share", self.share, 0 < self.share < 1, "over 0 and under 1")
        for name in ("masked", "random"):
            demand(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")
        demand("masked", self.masked, self.masked + self.random <= 1, f"1 at most with random {self.random}")
        at_least(0, self, "ways")


def chosen_tokens(
    able: Bool[Tensor, "T"], share: float, random: torch.Generator, starts: Bool[Tensor, "T"] | None = None
) -> Bool[Tensor, "T"]:
    """Choose a `share` of the `able` tokens, at least one if there is any.

    With `starts`, the tokens that begin a word, choose whole words in random order up to the same number of tokens
    (Google's `create_pretraining_data.py`)."""
    places = able.nonzero()[:, 0]
    count = max(1, round(share * len(places))) if len(places) else 0
    chosen = torch.zeros_like(able)
    if starts is None:
        chosen[places[torch.randperm(len(places), generator=random)[:count]]] = True
        return chosen
    word = starts.cumsum(0)[places].tolist()
    words: dict[int, list[int]] = {}
    for place, number in zip(places.tolist(), word, strict=True):
        words.setdefault(number, []).append(place)
    groups = list(words.values())
    for number in torch.randperm(len(groups), generator=random).tolist():
        if len(groups[number]) <= count:
            chosen[groups[number]] = True
            count -= len(groups[number])
    return chosen


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
        if settings.whole_words:
            if not hasattr(tokenizer, "vocab"):
                raise UsageError("needs a tokenizer that marks word starts, such as WordPiece", argument="whole_words")
            self.starts = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
            self.starts[[i for i, token in enumerate(tokenizer.vocab) if token.startswith("##")]] = False

    def __call__(
        self, ids: Int[Tensor, "T"], random: torch.Generator
    ) -> tuple[Int[Tensor, "T"], Bool[Tensor, "T"], Float[Tensor, "N"]]:
        """Return the masked text, the chosen tokens, and for each of those a number from 0 to 1 to draw a replacement
        with."""
        s, starts = self.settings, None if self.starts is None else self.starts[ids]
        chosen = chosen_tokens(self.ordinary[ids], s.share, random, starts)
        kind, draws = torch.rand(2, int(chosen.sum()), generator=random)
        others = self.ordinary.nonzero()[:, 0]
        other = others[torch.randint(len(others), (len(kind),), generator=random)]
        shown = torch.where(kind < s.masked + s.random, other, ids[chosen])
        read = ids.clone()
        read[chosen] = torch.where(kind < s.masked, self.tokenizer.mask_id, shown)
        return read, chosen, draws
