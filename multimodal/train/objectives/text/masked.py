"""Masked language modelling: BERT's masking, static or dynamic, with optional next-sentence prediction.

Masks depend on (seed, epoch, item) alone: dynamic masking (RoBERTa, Liu et al. 2019, section 4.1) changes with each
epoch, static masking cycles through a fixed number of `ways` per text (BERT's `dupe_factor`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.masks import places
from multimodal.blocks.stack import StackConfig, transformer
from multimodal.data.batching import PaddedText, bucketed, pad_rows, pad_text
from multimodal.data.datasets.documents import SentenceWindow
from multimodal.data.loader import Plan, generator
from multimodal.errors import DataError, multiple_of
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.system.options import Natural, Positive, Rate
from multimodal.train.device import moved
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.masking import Masker

NEXT, OTHER = 0, 1  # classes of BERT's next-sentence head, and of ALBERT's sentence order: kept, swapped
Pairs = Literal["next", "order"]


class MaskedExample(NamedTuple):
    """`follows`: NEXT or OTHER for the second part, or the order of both; -1 for a text of one part."""

    ids: Int[Tensor, "T"]
    chosen: Bool[Tensor, "T"]
    targets: Int[Tensor, "N"]
    draws: Float[Tensor, "N"]
    segments: Int[Tensor, "T"]
    follows: int


@dataclass(frozen=True)
class MaskedBatch(PaddedText):
    """`targets` and `draws` of the `chosen` tokens, row by row."""

    chosen: Bool[Tensor, "B T"]
    targets: Int[Tensor, "N"]
    draws: Float[Tensor, "N"]
    segments: Int[Tensor, "B T"]
    follows: Int[Tensor, "B"]

    @property
    def places(self) -> Int[Tensor, "N"]:
        """Flat positions of the chosen tokens."""
        return places(self.chosen, len(self.targets))


class MaskedTexts:
    """Windows as the loader's source, prepared as masked texts. A key is (way, number); dynamic masking uses way 0.

    `pairs`: windows are split between sentences. Half of the second parts of `next` are replaced by sentences of
    similar length from another document (Devlin et al. 2019, section 3.1), half of the pairs of `order` swapped (Lan et
    al. 2020, section 3.1). Raises DataError for too little text."""

    def __init__(
        self, windows: Sequence[SentenceWindow], masker: Masker, context: int, pairs: Pairs | None = None, seed: int = 0
    ):
        self.windows = [w for w in windows if len(w.sentences) > 1] if pairs else list(windows)
        self.masker, self.context, self.pairs, self.seed = masker, context, pairs, seed
        if not self.windows or (pairs == "next" and len({w.document for w in self.windows}) < 2):
            fewer = f"fewer than two documents with two sentences in {len(windows)} windows"
            raise DataError(f"holds {fewer if pairs else 'too little text for a window'}", argument="data")

    def __len__(self) -> int:
        return len(self.windows)

    def name(self, key: tuple[int, int]) -> str:
        return f"window {key[1]}, document {self.windows[key[1]].document}"

    def read(self, key: tuple[int, int]) -> tuple[int, int]:
        return key

    def prepare(self, key: tuple[int, int], random: torch.Generator) -> MaskedExample:
        way, number = key
        if self.masker.settings.ways:
            random = generator(self.seed, "static", way, number)
        window, start, end = self.windows[number], self.masker.tokenizer.bos_id, self.masker.tokenizer.eos_id
        parts, follows = ([window.ids], -1) if not self.pairs else self._pair(number, random)
        ids = torch.tensor([start, *(i for part in parts for i in (*part, end))])
        segments = torch.zeros_like(ids)
        segments[len(parts[0]) + 2 :] = 1
        read, chosen, draws = self.masker(ids, random)
        return MaskedExample(read, chosen, ids[chosen], draws, segments, follows)

    def _pair(self, number: int, random: torch.Generator) -> tuple[list[list[int]], int]:
        window = self.windows[number]
        cut, other, first = torch.rand(3, generator=random, dtype=torch.float64).tolist()
        cut = 1 + int(cut * (len(window.sentences) - 1))
        own = [i for sentence in window.sentences[:cut] for i in sentence]
        rest = [i for sentence in window.sentences[cut:] for i in sentence]
        if other < 0.5:
            return [own, rest], NEXT
        if self.pairs == "order":
            return [rest, own], OTHER
        while (far := self.windows[int(torch.randint(len(self), (), generator=random))]).document == window.document:
            pass
        found: list[int] = []
        for sentence in far.sentences[int(first * len(far.sentences)) :]:
            if len(found) < len(rest):  # so that the length gives no hint
                found += sentence
        return [own, found[: self.context - 3 - len(own)]], OTHER

    def plan(self, budget: int) -> Plan:
        """Return a plan of batches of similar length with at most `budget` padded tokens."""
        sizes = [window.size + 2 + bool(self.pairs) for window in self.windows]
        ways = max(1, self.masker.settings.ways)

        def plan(epoch: int) -> list[list[tuple[int, int]]]:
            batches = bucketed(sizes, budget, generator(self.seed, epoch))
            return [[(epoch % ways, number) for number in batch] for batch in batches]

        return plan


@dataclass(frozen=True)
class CollateMasked:
    """`context`: limit of the padded length."""

    pad_id: int
    context: int

    def __call__(self, examples: Sequence[MaskedExample]) -> MaskedBatch:
        text = pad_text([e.ids for e in examples], self.pad_id, limit=self.context)
        return MaskedBatch(
            text.ids, text.lengths, pad_rows([e.chosen for e in examples], False, limit=self.context),
            torch.cat([e.targets for e in examples]), torch.cat([e.draws for e in examples]),
            pad_rows([e.segments for e in examples], limit=self.context), torch.tensor([e.follows for e in examples]),
        )  # fmt: skip


def encode(model: TextTransformer, batch: MaskedBatch, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """The model's states of a batch with these ids."""
    segments = batch.segments if model.segments is not None else None
    return model.states(ids, valid=batch.valid, segments=segments)


class MaskedLanguage(Summed):
    """Cross-entropy of masked tokens, plus that of the next-sentence or sentence-order head, if the model has one."""

    def __init__(self, model: TextTransformer, pairs: Pairs = "next"):
        super().__init__(model)
        self.pairs = pairs
        self.weights: Mapping[str, float] = {"masked": 1.0} | ({pairs: 1.0} if model.classes else {})

    def forward(self, batch: MaskedBatch) -> dict[str, Tensor]:
        logits, follows = outputs(self.model, batch)
        terms = {"masked": F.cross_entropy(logits.float(), batch.targets, reduction="sum")}
        if follows is not None:
            terms[self.pairs] = F.cross_entropy(follows.float(), batch.follows, reduction="sum")
        return terms

    def counts(self, batch: MaskedBatch) -> dict[str, int]:
        return {"masked": len(batch.targets), self.pairs: len(batch.follows)}


def outputs(model: TextTransformer, batch: MaskedBatch) -> tuple[Float[Tensor, "N V"], Float[Tensor, "B 2"] | None]:
    """Logits of the tokens to guess, and of the next sentence where the model has such a head."""
    states = encode(model, batch, batch.ids)
    follows = model.classes(model.pooled(states)) if model.classes else None
    return model.logits(states.flatten(0, 1)[batch.places][None])[0], follows


@torch.inference_mode()
def masked_figures(model: TextTransformer, batches: Sequence[MaskedBatch], pairs: Pairs = "next") -> dict[str, float]:
    """Return cross-entropy (nats), perplexity and accuracy of masked tokens, and of next sentences or their order.
    Raises DataError if no token is masked."""
    loss = right = followed = 0.0
    device = next(model.parameters()).device
    for batch in moved(list(batches), device):
        logits, follows = outputs(model, batch)
        loss += float(F.cross_entropy(logits.float(), batch.targets, reduction="sum"))
        right += int((logits.argmax(-1) == batch.targets).sum())
        followed += 0 if follows is None else int((follows.argmax(-1) == batch.follows).sum())
    tokens, rows = sum(len(b.targets) for b in batches), sum(len(b.lengths) for b in batches)
    if not tokens:
        raise DataError(f"validation texts: expected a known token to predict, got none in {rows} texts")
    mean = torch.tensor(loss / tokens, dtype=torch.float64)
    figures = {"masked": float(mean), "perplexity": float(mean.exp()), "accuracy": right / tokens}
    return figures | ({f"{pairs}_accuracy": followed / rows} if model.classes else {})


@dataclass(frozen=True)
class EncoderSettings:
    """Sizes of a new BERT-style encoder."""

    width: Positive = 256
    layers: Natural = 4
    heads: Positive = 4
    context: Positive = 128
    dropout: Rate | None = 0.1  # None: 0, or as a model that is trained further has it

    def __post_init__(self):
        if self.layers:
            multiple_of("heads", self, "width")

    def stack(self) -> StackConfig:
        """BERT's stack: post-norm, epsilon 1e-12, GELU, hidden width 4x."""
        made = transformer(
            self.width, self.layers, self.heads, 4 * self.width, norm_eps=1e-12, dropout=self.dropout or 0.0,
            final_norm=False,
        )  # fmt: skip
        return replace(made, block=replace(made.block, post_norm=True))


def bert(
    vocabulary: int, s: EncoderSettings, pairs: bool = False, embed_width: int | None = None, shared: bool = False
) -> TextConfig:
    """BERT (Devlin et al. 2019), with segments, pooler and next-sentence head for `pairs`. `embed_width`: of narrower
    embeddings, `shared`: one block for all layers (ALBERT, Lan et al. 2020)."""
    heads = {"segments": 2, "pool": "tanh", "classes": 2} if pairs else {}
    stack = replace(s.stack(), shared=1 if shared else None)
    return TextConfig(
        vocabulary, s.context, stack, causal=False, tied=True, stem_norm=True, transform=True,
        head_bias=True, stem_dropout=s.dropout or 0.0, embed_width=embed_width, **heads,
    )  # fmt: skip
