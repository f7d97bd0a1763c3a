"""Denoising pretraining of an encoder-decoder: configuration, items, objective and metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.data.datasets.documents import SentenceWindow
from multimodal.data.datasets.text import IGNORED
from multimodal.data.examples import SizedExamples
from multimodal.errors import DataError, UsageError, multiple_of
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.system.options import Limits, Natural, Positive, ProperShare, Rate, check_limits
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.device import moved
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.denoise import OBJECTIVES, Vocabulary
from multimodal.train.objectives.text.translation import Pair, PairBatch, target_logits


@dataclass(frozen=True)
class NoiseSettings:
    """Corruption of the texts."""

    share: ProperShare = 0.15  # share of the tokens to corrupt
    span: Annotated[float, Limits(0.1, 100, below=True)] = 3.0  # tokens of a span, on average

    def __post_init__(self):
        check_limits(self)


def sentinels(tokenizer: Tokenizer, count: int) -> list[int]:
    """Return T5's sentinels: the last ids of the vocabulary, in descending order. Raises UsageError if any is text."""
    result = [tokenizer.vocab_size - 1 - i for i in range(count)]
    if not set(result) <= tokenizer.control:
        raise UsageError(f"must end in {count} control tokens to use as sentinels", argument="tokenizer")
    return result


class DenoisedTexts(SizedExamples[SentenceWindow]):
    """Windows as the loader's source, prepared as pairs of a corrupted text and its target."""

    def __init__(self, windows: Sequence[SentenceWindow], tokenizer: Tokenizer, marks: Sequence[int], start_id: int,
                 objective: str, noise: NoiseSettings):  # fmt: skip
        if not windows:
            raise DataError("holds no text", argument="data")
        if tokenizer.eos_id is None or tokenizer.mask_id is None:
            raise UsageError("has no eos_id or no mask_id, which denoising needs", argument="tokenizer")
        ordinary = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.control]
        self.vocabulary = Vocabulary(tokenizer.mask_id, marks, torch.tensor(ordinary))
        self.eos_id, self.start_id = tokenizer.eos_id, start_id
        self.make, self.noise = OBJECTIVES[objective], noise
        super().__init__(windows, [window.size + 1 for window in windows], "window")  # with the end of the text

    def name(self, key: int) -> str:
        return f"window {key}, document {self.examples[key].document}"

    def prepare(self, window: SentenceWindow, random: torch.Generator) -> Pair:
        result = self.make(window.sentences, self.vocabulary, random, self.noise.share, self.noise.span)
        return Pair([*result.source.tolist(), self.eos_id], [self.start_id, *result.target.tolist(), self.eos_id])


class Denoising(Summed):
    """Cross-entropy of each next token of the target."""

    def forward(self, batch: PairBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(*target_logits(self.model, batch), reduction="sum")}

    def counts(self, batch: PairBatch) -> dict[str, int | Tensor]:
        return {"loss": (batch.answer.lengths - 1).sum()}


@torch.inference_mode()
def denoising_figures(
    model: EncoderDecoder, batches: Sequence[PairBatch], ordinary: Int[Tensor, "V"]
) -> dict[str, float]:
    """Return next-token cross-entropy (nats) over the target, and cross-entropy (`text`) and accuracy over its text
    tokens alone, since sentinels and the end are easy to predict."""
    text = torch.zeros(model.config.decoder.vocabulary, dtype=torch.bool)
    text[ordinary] = True
    losses: list[Tensor] = []
    right: list[Bool[Tensor, "N"]] = []
    kept: list[Bool[Tensor, "N"]] = []
    for batch in moved(list(batches), next(model.parameters()).device):
        logits, targets = target_logits(model, batch)
        logits, targets = logits[real := targets != IGNORED], targets[real]
        losses.append(F.cross_entropy(logits, targets, reduction="none").cpu())
        right.append((logits.argmax(-1) == targets).cpu())
        kept.append(text[targets.cpu()])
    loss, known, words = torch.cat(losses).double(), torch.cat(right).double(), torch.cat(kept)
    return {"loss": float(loss.mean()), "text": float(loss[words].mean()), "accuracy": float(known[words].mean())}


@dataclass(frozen=True)
class SizeSettings:
    """Sizes of a new encoder-decoder."""

    width: Positive = 256
    encoder_layers: Natural = 3
    decoder_layers: Positive = 3
    heads: Positive = 4
    context: Positive = 128
    dropout: Rate = 0.0

    def __post_init__(self):
        multiple_of("heads", self, "width")


def encoder_decoder(vocabulary: int, style: str, start_id: int, s: SizeSettings) -> EncoderDecoder:
    """Build the architecture of T5 (Raffel et al. 2020: pre-RMSNorm, no biases, relative position bias, ReLU) or BART
    (Lewis et al. 2020: post-LayerNorm, learned positions, GELU). T5's queries start small because its attention is not
    scaled; its embeddings start smaller than in the paper, with which a decoder first copies its input."""
    t5 = style == "t5"
    attention = AttentionConfig(s.width, s.heads, bias=not t5, scale=1.0 if t5 else None, dropout=s.dropout)
    block = BlockConfig(
        attention, 4 * s.width, "relu" if t5 else "gelu", norm="rms" if t5 else "layer", norm_eps=1e-6 if t5 else 1e-5,
        post_norm=not t5, dropout=s.dropout,
    )  # fmt: skip
    encoder = TextConfig(
        0, s.context, StackConfig(block, s.encoder_layers, final_norm=t5), causal=False, stem_norm=not t5,
        positions=PositionConfig("bucket" if t5 else "learned"), stem_dropout=s.dropout,
    )  # fmt: skip
    crossing = StackConfig(replace(block, cross=attention), s.decoder_layers, final_norm=t5)
    decoder = replace(
        encoder, vocabulary=vocabulary, stack=crossing, causal=True, tied=True, logit_scale=s.width**-0.5 if t5 else 1.0
    )
    model = EncoderDecoder(EncoderDecoderConfig(encoder, decoder, start_id))
    if t5:
        nn.init.normal_(model.decoder.embed.weight, std=s.width**-0.5)
        for module in model.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.query.weight, std=(s.width * module.head_width) ** -0.5)
    return model
