"""Training a captioner: its batches, its objective, and a new decoder above a known image encoder.

A sentence without a picture teaches the decoder the language: it attends to a source of zeros, which says nothing.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.stack import transformer
from multimodal.data.datasets.captions import Example
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.captioner import Captioner, CaptionerConfig
from multimodal.models.clip import CLIP
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT
from multimodal.tokens.text.vocabulary import BytePairTokenizer
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint


class Batch(NamedTuple):
    """`pictures`: for each text the row of its picture, -1 for none."""

    images: Float[Tensor, "P 3 H W"]
    pictures: Int[Tensor, "B"]
    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, "B"]  # bos and eos included

    @property
    def padding(self) -> float:
        return 1 - float(self.lengths.sum()) / self.ids.numel()


def collate(examples: list[Example]) -> Batch:
    places, pixels = [], []
    for example in examples:
        places.append(-1 if example.pixels is None else len(pixels))
        pixels += [] if example.pixels is None else [example.pixels]
    ids = [torch.tensor(example.ids) for example in examples]
    return Batch(
        torch.stack(pixels) if pixels else torch.zeros(0, 3, 1, 1), torch.tensor(places),
        torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([len(row) for row in ids]),
    )  # fmt: skip


class Captioning(Summed):
    """Cross-entropy of each next token. `captions` is the mean over the tokens of captions, `sentences` over those of
    sentences alone, which counts `alone` times. `smoothing`: of the labels (Szegedy et al. 2016)."""

    def __init__(self, model: Captioner, smoothing: float = 0.1, alone: float = 1.0):
        super().__init__(model)
        self.smoothing, self.weights = smoothing, {"captions": 1.0, "sentences": alone}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        decoder, width = self.model.decoder, self.model.config.image.width
        seen = self.model.encode(batch.images) if len(batch.images) else decoder.positions.new_zeros(0, 1, width)
        source = torch.cat([seen, seen.new_zeros(1, *seen.shape[1:])])  # -1 finds the zeros
        states = decoder.states(batch.ids[:, :-1], source[batch.pictures])
        real = torch.arange(states.shape[1], device=states.device) < batch.lengths[:, None] - 1
        logits = decoder.logits(states[real][None])[0]
        losses = F.cross_entropy(logits, batch.ids[:, 1:][real], reduction="none", label_smoothing=self.smoothing)
        alone = (batch.pictures < 0)[:, None].expand_as(real)[real]
        return {"captions": torch.where(alone, 0, losses).sum(), "sentences": torch.where(alone, losses, 0).sum()}

    def counts(self, batch: Batch) -> dict[str, int | Tensor]:
        alone = batch.pictures < 0
        tokens = batch.lengths - 1
        return {"captions": (tokens * ~alone).sum(), "sentences": (tokens * alone).sum()}


@dataclasses.dataclass(frozen=True)
class DecoderSettings:
    """`encoder_layers`: how many of the encoder's first layers are used (0: all). `drop_path`: of the encoder.
    `queries`: of CoCa's attention pooling. CoCa's decoder has the width, heads and context of the text tower."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 28
    dropout: float = 0.05
    encoder_layers: int = 0
    drop_path: float = 0.0
    queries: int = 32


def captioner(start: nn.Module, vocabulary: int, s: DecoderSettings) -> Captioner:
    """A new decoder above the image encoder of a contrastive or vision model, whose weights are copied.

    Raises CheckpointError for a model without one, UsageError for more layers than it has."""
    tower = start.image if isinstance(start, CLIP) else start
    if not isinstance(tower, ViT):
        raise CheckpointError(f"{type(start).__name__}: has no image encoder that captions could be made from")
    own = tower.config.stack
    if s.encoder_layers > own.layers:
        raise UsageError(f"--encoder_layers {s.encoder_layers}: the encoder has {own.layers}")
    stack = dataclasses.replace(own, layers=s.encoder_layers or own.layers, drop_path=s.drop_path)
    image = dataclasses.replace(tower.config, stack=stack, pool="none", classes=0, norm_after_pool=False)
    text = transformer(s.width, s.layers, s.heads, 4 * s.width, source_width=image.width, dropout=s.dropout)
    model = Captioner(CaptionerConfig(image, TextConfig(vocabulary, s.context, text, causal=True, tied=True)))
    weights = tower.state_dict()
    model.image.load_state_dict({name: weights[name] for name in model.image.state_dict()})
    return model


def begin(known: Checkpoint, texts: Iterable[str], vocabulary: int, s: DecoderSettings) -> Checkpoint:
    """What training begins with: a captioner as it is, or else `captioner` with a vocabulary learned from `texts`.

    Raises CheckpointError where the preprocessing is not known."""
    if known.preprocessing is None:
        raise CheckpointError(f"{known.source}: its preprocessing is not known")
    if isinstance(known.model, Captioner):
        return known
    tokenizer = BytePairTokenizer.train(texts, vocabulary, lowercase=True)
    return Checkpoint(captioner(known.model, tokenizer.vocab_size, s), tokenizer, known.preprocessing)
