"""Captioner training: batches, objective, and a new decoder on a trained image encoder.

Sentences without images teach the decoder the language; they attend to a source of zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.masks import padding
from multimodal.blocks.stack import transformer
from multimodal.data.batching import PaddedText, pad_text
from multimodal.data.datasets.captions import DRAWS, CaptionAugmentSettings, CaptionExample, augmented, stacked_images
from multimodal.data.loader import Deferred
from multimodal.errors import CheckpointError, UsageError, multiple_of
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.clip import CLIP
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT
from multimodal.system.options import Natural, Positive, Rate
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.train.lora import keep_sizes, text_sizes, with_rates
from multimodal.train.losses import selected
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class CaptionBatch(PaddedText):
    """Captions from bos to eos. `rows`: the image of each text, -1 for none."""

    images: Float[Tensor, "P 3 H W"]
    rows: Int[Tensor, "B"]


@dataclass(frozen=True)
class CollateCaptions:
    """Collates captions; the device augments their images."""

    record: Preprocessing
    settings: CaptionAugmentSettings

    def __call__(self, examples: Sequence[CaptionExample]) -> Deferred:
        with_image = [example for example in examples if example.image is not None]
        rows, known = [], 0
        for example in examples:
            rows.append(-1 if example.image is None else known)
            known += example.image is not None
        text = pad_text([example.ids for example in examples], multiple=1)
        draws = torch.stack([example.draws for example in with_image]) if with_image else torch.zeros(0, DRAWS)
        images = stacked_images([example.image for example in with_image])
        return Deferred(partial(_captioned, self), (text, *images, draws, torch.tensor(rows)))


def _captioned(c: CollateCaptions, text: PaddedText, images: Tensor, sizes: Tensor, draws: Tensor, rows: Tensor):
    return CaptionBatch(text.ids, text.lengths, augmented(images, sizes, draws, c.record, c.settings), rows)


class Captioning(Summed):
    """Next-token cross-entropy: `captions` is the mean over caption tokens, `sentences` over the tokens of sentences
    without an image, weighted by `alone`. `smoothing`: label smoothing (Szegedy et al. 2016)."""

    def __init__(self, model: VisionEncoderDecoder, smoothing: float = 0.1, alone: float = 1.0):
        super().__init__(model)
        self.smoothing, self.weights = smoothing, {"captions": 1.0, "sentences": alone}

    def forward(self, batch: CaptionBatch) -> dict[str, Tensor]:
        decoder, width = self.model.decoder, self.model.config.image.width
        seen = self.model.encode(batch.images) if len(batch.images) else decoder.positions.new_zeros(0, 1, width)
        source = torch.cat([seen, seen.new_zeros(1, *seen.shape[1:])])  # row -1 is zeros
        states = decoder.states(batch.ids[:, :-1], source[batch.rows])
        real = padding(batch.lengths - 1, states.shape[1])
        alone = (batch.rows < 0)[:, None].expand_as(real)
        wanted, states, alone = selected(real, batch.ids[:, 1:], states, alone)
        logits = decoder.logits(states[None])[0]
        losses = F.cross_entropy(logits, wanted, reduction="none", label_smoothing=self.smoothing)
        return {"captions": torch.where(alone, 0, losses).sum(), "sentences": torch.where(alone, losses, 0).sum()}

    def counts(self, batch: CaptionBatch) -> dict[str, int | Tensor]:
        alone = batch.rows < 0
        tokens = batch.lengths - 1
        return {"captions": (tokens * ~alone).sum(), "sentences": (tokens * alone).sum()}


@dataclass(frozen=True)
class DecoderSettings:
    """Sizes of a new decoder. CoCa's takes width, heads and context from the text tower."""

    width: Positive = 128
    layers: Positive = 2
    heads: Positive = 4
    context: Positive = 28
    dropout: Rate | None = None  # by default 0.05; a model of the family that is trained further keeps its own
    encoder_layers: Natural = 0  # first layers of the encoder to use (0: all)
    drop_path: Rate | None = None  # of the encoder: by default 0, or as that model has it
    queries: Positive = 32  # of CoCa's attention pooling

    def __post_init__(self):
        multiple_of("heads", self, "width")

    @property
    def new_dropout(self) -> float:
        return 0.05 if self.dropout is None else self.dropout


def captioner(start: nn.Module, vocabulary: int, s: DecoderSettings) -> VisionEncoderDecoder:
    """Build a captioner with a new decoder on a copy of a contrastive or vision model's image encoder.

    Raises CheckpointError for a model without one, UsageError for more layers than it has."""
    tower = start.image if isinstance(start, CLIP) else start
    if not isinstance(tower, ViT):
        raise CheckpointError(f"{type(start).__name__}: expected a model with an image encoder")
    own = tower.config.stack
    if s.encoder_layers > own.layers:
        raise UsageError(f"{s.encoder_layers}: the encoder has {own.layers}", argument="encoder_layers")
    stack = replace(own, layers=s.encoder_layers or own.layers, drop_path=s.drop_path or 0.0)
    image = replace(tower.config, stack=stack, pool="none", classes=0, norm_after_pool=False)
    text = transformer(s.width, s.layers, s.heads, 4 * s.width, source_width=image.width, dropout=s.new_dropout)
    model = VisionEncoderDecoder(
        VisionEncoderDecoderConfig(image, TextConfig(vocabulary, s.context, text, causal=True, tied=True))
    )
    weights = tower.state_dict()
    model.image.load_state_dict({name: weights[name] for name in model.image.state_dict()})
    return model


def begin(known: Checkpoint, texts: Iterable[str], vocabulary: int, s: DecoderSettings) -> Checkpoint:
    """Return the checkpoint to train: a captioner as it is, or a new one with a vocabulary learned from `texts`.

    Raises CheckpointError for a checkpoint without preprocessing."""
    if known.preprocessing is None:
        raise CheckpointError(f"{known.source}: checkpoint has no preprocessing")
    if isinstance(known.model, VisionEncoderDecoder):
        config = known.model.config
        sizes = text_sizes(config.decoder) | {"encoder_layers": config.image.stack.layers}
        keep_sizes(known.source, sizes, s, DecoderSettings)
        rates = {"decoder.stack.block.dropout": s.dropout, "image.stack.drop_path": s.drop_path}
        return replace(known, model=with_rates(known.model, rates))
    tokenizer = BytePairTokenizer.train(texts, vocabulary, lowercase=True)
    return Checkpoint(captioner(known.model, tokenizer.vocab_size, s), tokenizer, known.preprocessing)
