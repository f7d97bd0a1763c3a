"""Sentence embeddings: pairs of sentences that mean the same, and the contrastive objective over them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.stack import transformer
from multimodal.data.batching import pad_text
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.train.objectives.contrastive import Contrastive
from multimodal.train.objectives.text.masked import EncoderSettings
from multimodal.train.objectives.text.translation import AlignedPair, PairBatch
from multimodal.weights.folder import Checkpoint

TEMPERATURE = 0.05  # at the start (SimCSE, Gao et al. 2021)


class SentenceEncoder(nn.Module):
    """A text encoder with the mean of its states as the sentence's vector, and the learned scale of the logits."""

    logit_bias = None

    def __init__(self, text: TextTransformer):
        super().__init__()
        self.text, self.logit_scale = text, nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))

    def forward(self, ids: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B D"]:
        """Unit vectors."""
        states = self.text.states(ids, valid=valid)
        return F.normalize((states * valid[..., None]).sum(1) / valid.sum(1, keepdim=True), dim=-1)


@dataclass(frozen=True)
class SentenceBatch(PairBatch):
    """Pairs of sentences; those of the same line of the corpus match each other."""

    concepts: Int[Tensor, "B"]

    @property
    def terms(self) -> Int[Tensor, "B"]:
        return self.concepts


@dataclass(frozen=True)
class CollateSentences:
    """`context`: limit of the padded length."""

    pad_id: int
    context: int

    def __call__(self, pairs: Sequence[AlignedPair]) -> SentenceBatch:
        first, second, lines = zip(*pairs, strict=True)
        sides = (pad_text(side, self.pad_id, limit=self.context) for side in (first, second))
        return SentenceBatch(*sides, torch.tensor(lines))


class SentencePairs(Contrastive):
    """Each sentence must find its partner among the other side's sentences of the step, both ways."""

    def forward(self, batch: SentenceBatch) -> tuple[Tensor, ...]:
        return self._with_scalars(*(self.model(side.ids, side.valid) for side in (batch.source, batch.answer)))


def sentence_encoder(vocabulary: int, s: EncoderSettings) -> TextTransformer:
    """Build a pre-norm encoder that starts as a bag of words: the last map of each branch is zero, and without a final
    norm the length of a token's embedding is its weight in the mean."""
    stack = transformer(s.width, s.layers, s.heads, 4 * s.width, dropout=s.dropout or 0.0, final_norm=False)
    model = TextTransformer(TextConfig(vocabulary, s.context, stack, causal=False, stem_dropout=s.dropout or 0.0))
    for block in model.stack.blocks:
        for last in (block.attention.out, block.feed.down):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
    return model


def grown(words: TextTransformer, s: EncoderSettings) -> TextTransformer:
    """Add blocks to a bag of words, a model without layers. They change nothing until they are trained."""
    config = words.config
    dropout = config.stem_dropout if s.dropout is None else s.dropout
    model = sentence_encoder(config.vocabulary, replace(s, width=config.width, context=config.context, dropout=dropout))
    model.load_state_dict(words.state_dict(), strict=False)
    return model


def without_heads(known: Checkpoint) -> TextTransformer:
    """Build an encoder with the weights of a text model, without its heads. Raises CheckpointError for another."""
    if not isinstance(known.model, TextTransformer) or known.model.config.causal or known.tokenizer is None:
        raise CheckpointError(f"{known.source}: expected a text encoder with a tokenizer, got {known.kind}")
    config = replace(
        known.model.config, tied=None, transform=False, head_bias=False, pool=None, classes=0, tags=0, spans=False,
        detect=False, projections=(),
    )  # fmt: skip
    model = TextTransformer(config)
    weights = known.model.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model
