"""Masked language modelling: BERT's masking, static or dynamic, with next sentences where they are asked for.

What is masked depends on (seed, epoch, item) alone: dynamic masking (RoBERTa, Liu et al. 2019, section 4.1) is new in
each epoch, static masking one of `ways` that each text is masked in, made once, in turn (BERT's `dupe_factor`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.masks import padding
from multimodal.blocks.stack import StackConfig, transformer
from multimodal.data.batching import bucketed, padded_length
from multimodal.data.datasets.documents import Window
from multimodal.data.loader import Plan, generator
from multimodal.errors import DataError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.train.device import moved
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.masking import Masker

NEXT, OTHER = 0, 1  # classes of the next-sentence head, as BERT's weights have them


class Example(NamedTuple):
    """`follows`: whether the second part is the one that follows, NEXT or OTHER; -1 for a text of one part."""

    ids: Int[Tensor, "T"]
    chosen: Bool[Tensor, "T"]
    targets: Int[Tensor, "N"]
    draws: Float[Tensor, "N"]
    segments: Int[Tensor, "T"]
    follows: int


@dataclass(frozen=True)
class MaskedBatch:
    """`targets` and `draws` of the `chosen` tokens, row by row."""

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]
    chosen: Bool[Tensor, "B T"]
    targets: Int[Tensor, "N"]
    draws: Float[Tensor, "N"]
    segments: Int[Tensor, "B T"]
    follows: Int[Tensor, "B"]

    @property
    def padding(self) -> float:
        return 1 - float(self.lengths.sum()) / self.ids.numel()


class Masked:
    """Windows as masked texts: the loader's source, and what prepares its items. A key is (way, number); the way is 0
    where masking is dynamic.

    `pairs`: a window is cut into two parts between sentences; half the time the second one is replaced by sentences of
    another document, about as long (Devlin et al. 2019, section 3.1). Raises DataError where there is too little."""

    def __init__(self, windows: Sequence[Window], masker: Masker, context: int, pairs: bool = False, seed: int = 0):
        self.windows = [w for w in windows if len(w.sentences) > 1] if pairs else list(windows)
        self.masker, self.context, self.pairs, self.seed = masker, context, pairs, seed
        if not self.windows or (pairs and len({w.document for w in self.windows}) < 2):
            least = "two documents with two sentences" if pairs else "no text"
            raise DataError(f"--data: {'fewer than ' if pairs else ''}{least} in {len(windows)} windows")

    def __len__(self) -> int:
        return len(self.windows)

    def name(self, key: tuple[int, int]) -> str:
        return f"window {key[1]}, document {self.windows[key[1]].document}"

    def read(self, key: tuple[int, int]) -> tuple[int, int]:
        return key

    def prepare(self, key: tuple[int, int], random: torch.Generator) -> Example:
        way, number = key
        if self.masker.settings.ways:
            random = generator(self.seed, "static", way, number)
        window, start, end = self.windows[number], self.masker.tokenizer.bos_id, self.masker.tokenizer.eos_id
        parts, follows = ([window.ids], -1) if not self.pairs else self._pair(number, random)
        ids = torch.tensor([start, *(i for part in parts for i in (*part, end))])
        segments = torch.zeros_like(ids)
        segments[len(parts[0]) + 2 :] = 1
        read, chosen, draws = self.masker(ids, random)
        return Example(read, chosen, ids[chosen], draws, segments, follows)

    def _pair(self, number: int, random: torch.Generator) -> tuple[list[list[int]], int]:
        window = self.windows[number]
        cut, other, first = torch.rand(3, generator=random, dtype=torch.float64).tolist()
        cut = 1 + int(cut * (len(window.sentences) - 1))
        own = [i for sentence in window.sentences[:cut] for i in sentence]
        rest = [i for sentence in window.sentences[cut:] for i in sentence]
        if other < 0.5:
            return [own, rest], NEXT
        while (far := self.windows[int(torch.randint(len(self), (), generator=random))]).document == window.document:
            pass
        found: list[int] = []
        for sentence in far.sentences[int(first * len(far.sentences)) :]:
            if len(found) < len(rest):  # so that the length does not tell
                found += sentence
        return [own, found[: self.context - 3 - len(own)]], OTHER

    def plan(self, budget: int) -> Plan:
        """Batches of like length with at most `budget` padded tokens, a pure function of the epoch."""
        sizes = [window.size + 2 + self.pairs for window in self.windows]
        ways = max(1, self.masker.settings.ways)

        def plan(epoch: int) -> list[list[tuple[int, int]]]:
            batches = bucketed(sizes, budget, generator(self.seed, epoch))
            return [[(epoch % ways, number) for number in batch] for batch in batches]

        return plan


@dataclass(frozen=True)
class CollateMasked:
    """`context`: no row gets longer than it by its padding."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[Example]) -> MaskedBatch:
        lengths = torch.tensor([len(example.ids) for example in examples])
        shape = len(examples), padded_length(int(lengths.max()), self.context)
        none = torch.zeros(shape, dtype=torch.long)
        rows = torch.full(shape, self.pad_id), none.bool(), none
        for number, example in enumerate(examples):
            for row, own in zip(rows, (example.ids, example.chosen, example.segments), strict=True):
                row[number, : len(own)] = own
        ids, chosen, segments = rows
        return MaskedBatch(
            ids, lengths, chosen, torch.cat([e.targets for e in examples]), torch.cat([e.draws for e in examples]),
            segments, torch.tensor([e.follows for e in examples]),
        )  # fmt: skip


def encode(model: TextTransformer, batch: MaskedBatch, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    segments = batch.segments if model.segments is not None else None
    return model.states(ids, valid=padding(batch.lengths, ids.shape[1]), segments=segments)


class MaskedLanguage(Summed):
    """Cross-entropy of the tokens to guess, and of whether the second part follows where the model tells."""

    def __init__(self, model: TextTransformer):
        super().__init__(model)
        self.weights: Mapping[str, float] = {"masked": 1.0} | ({"next": 1.0} if model.classes else {})

    def forward(self, batch: MaskedBatch) -> dict[str, Tensor]:
        logits, follows = outputs(self.model, batch)
        terms = {"masked": F.cross_entropy(logits.float(), batch.targets, reduction="sum")}
        if follows is not None:
            terms["next"] = F.cross_entropy(follows.float(), batch.follows, reduction="sum")
        return terms

    def counts(self, batch: MaskedBatch) -> dict[str, int]:
        return {"masked": len(batch.targets), "next": len(batch.follows)}


def outputs(model: TextTransformer, batch: MaskedBatch) -> tuple[Float[Tensor, "N V"], Float[Tensor, "B 2"] | None]:
    """Logits of the tokens to guess, and of the next sentence where the model has such a head."""
    states = encode(model, batch, batch.ids)
    follows = model.classes(model.pooled(states)) if model.classes else None
    return model.logits(states[batch.chosen][None])[0], follows


@torch.inference_mode()
def masked_figures(model: TextTransformer, batches: Sequence[MaskedBatch]) -> dict[str, float]:
    """Cross-entropy (nats) and perplexity of a token to guess, the share of those that are guessed right, and of the
    next sentences."""
    loss = right = told = 0.0
    device = next(model.parameters()).device
    for batch in moved(list(batches), device):
        logits, follows = outputs(model, batch)
        loss += float(F.cross_entropy(logits.float(), batch.targets, reduction="sum"))
        right += int((logits.argmax(-1) == batch.targets).sum())
        told += 0 if follows is None else int((follows.argmax(-1) == batch.follows).sum())
    tokens, rows = sum(len(b.targets) for b in batches), sum(len(b.lengths) for b in batches)
    mean = torch.tensor(loss / tokens, dtype=torch.float64)
    figures = {"masked": float(mean), "perplexity": float(mean.exp()), "accuracy": right / tokens}
    return figures | ({"next_accuracy": told / rows} if model.classes else {})


@dataclass(frozen=True)
class EncoderSettings:
    """Sizes of a new encoder, of BERT's kind: norms after each sum."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    dropout: float = 0.1

    def stack(self) -> StackConfig:
        """As BERT has it: norms after each sum, epsilon 1e-12, GELU, four times the width inside."""
        made = transformer(
            self.width, self.layers, self.heads, 4 * self.width, norm_eps=1e-12, dropout=self.dropout, final_norm=False
        )
        return replace(made, block=replace(made.block, post_norm=True))


def bert(vocabulary: int, s: EncoderSettings, pairs: bool = False) -> TextConfig:
    """BERT (Devlin et al. 2019), with segments, pooler and next-sentence head for `pairs`."""
    told = {"segments": 2, "pool": "tanh", "classes": 2} if pairs else {}
    return TextConfig(
        vocabulary, s.context, s.stack(), causal=False, tied=True, stem_norm=True, transform=True, head_bias=True,
        stem_dropout=s.dropout, **told,
    )  # fmt: skip
