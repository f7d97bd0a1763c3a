"""Joint CTC and attention objective, and the small Conformer of the speech recipe."""

import logging
import sys
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.blocks.masks import padding
from multimodal.blocks.stack import transformer
from multimodal.data.datasets.speech import SpeechCorpus
from multimodal.errors import CheckpointError, UsageError, demand
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.models.text_config import TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.train.losses import ctc_loss, token_loss
from multimodal.train.objective import Summed
from multimodal.train.objectives.augment_speech import SpeechBatch
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)
Terms = Literal["joint", "ctc", "attention"]


def joint_config(
    vocabulary: int, width: int, layers: int, decoder_layers: int, context: int, drop_path: float, chunk: int = 0,
    left: int = 0, dynamic: bool = False,
) -> ConformerCTCConfig:  # fmt: skip
    """Configure a Conformer with 4-fold subsampling, and a decoder of `context` positions unless it has 0 layers.
    Frames of 40 ms attend to their `chunk` (0: all; Chen et al. 2021) and to `left` frames before it (0: all), with
    `dynamic` in streams and in most batches of the training."""
    attention = AttentionConfig(width, heads=4)
    block = ConformerConfig(attention, hidden=4 * width, kernel=15, conv_norm="layer", conv_causal=chunk > 0)
    encoder = ConformerEncoderConfig(
        80, block, layers, subsample=4, channels=32, rotary=True, chunk=chunk, drop_path=drop_path, left=left,
        dynamic=dynamic,
    )  # fmt: skip
    stack = transformer(width, decoder_layers, 4, 2 * width, source_width=width)
    decoder = TextConfig(vocabulary, context, stack, causal=True, tied=True) if decoder_layers else None
    return ConformerCTCConfig(encoder, vocabulary, decoder)


def most_ids(model: ConformerCTC) -> int:
    """Return the longest trainable text in tokens: the decoder's context less the start token."""
    return model.decoder.config.context - 1 if model.decoder is not None else sys.maxsize


def check_features(known: Checkpoint) -> None:
    """Raise CheckpointError for a recognizer of other features than those that training computes and augments."""
    if (kind := known.model.config.encoder.features) != "fixed":
        raise CheckpointError(f"{known.source}: expected an encoder of 'fixed' log-mel features, got {kind!r}")


def warn_of_short(corpus: SpeechCorpus, model: ConformerCTC) -> None:
    """Log how many recordings have fewer states than CTC needs for their tokens, with a blank between equal ones."""
    states = map(model.config.encoder.states, corpus.lengths)
    needed = (len(ids) + sum(a == b for a, b in pairwise(ids)) for ids in corpus.ids)
    if short := sum(a < b for a, b in zip(states, needed, strict=True)):
        log.warning("%d of %d recordings are too short for their texts: CTC does not learn them", short, len(corpus))


class Recognition(Summed):
    """`attention` times the decoder's cross-entropy with label smoothing 0.1 plus CTC for the rest (Watanabe et al.
    2017), a share `middle` of it at the middle layer (Lee and Watanabe 2021). All are means per target token, with the
    decoder's end. `terms` "ctc" and "attention" train one alone and freeze the other's own weights.

    Raises UsageError for weights out of range, or a model or tokenizer without the trained parts."""

    def __init__(
        self, model: ConformerCTC, tokenizer: Tokenizer, terms: Terms = "joint", attention: float = 0.3,
        middle: float = 0.3,
    ):  # fmt: skip
        super().__init__(model)
        share = {"ctc": 0.0, "attention": 1.0}.get(terms, attention)
        demand("attention", attention, 0 <= share <= 1, "0 to 1")
        demand("middle", middle, 0 <= middle < 1, "0 to under 1")
        weights = {"attention": share, "ctc": (1 - share) * (1 - middle), "middle": (1 - share) * middle}
        self.weights = {name: weight for name, weight in weights.items() if weight}
        if share and (model.decoder is None or tokenizer.bos_id is None or tokenizer.eos_id is None):
            raise UsageError(
                f"{terms}: the model has no attention decoder with a start and an end to train", argument="terms"
            )
        self.bos, self.eos = tokenizer.bos_id, tokenizer.eos_id
        model.ctc.requires_grad_(share < 1)
        if model.decoder is not None:
            model.decoder.requires_grad_(share > 0)

    def counts(self, batch: SpeechBatch) -> dict[str, int | Tensor]:
        tokens = batch.id_lengths.sum()
        return {"ctc": tokens, "middle": tokens, "attention": tokens + len(batch.ids)}

    def forward(self, batch: SpeechBatch) -> dict[str, Tensor]:
        states: list[Tensor] = []
        frames, lengths = self.model.encoder(batch.features, batch.lengths, states)
        sizes = [self.model.config.encoder.states(size) for size in batch.sizes]
        sums: dict[str, Any] = {}
        for name, x in (("ctc", frames), ("middle", states[len(states) // 2])):
            if name in self.weights:
                logits, blank = self.model.ctc_logits(x), self.model.config.blank
                sums[name] = ctc_loss(logits, sizes, batch.ids, batch.id_sizes, blank).sum()
        if "attention" in self.weights:
            sums["attention"] = self._attention(batch, frames, lengths)
        return sums

    def _attention(self, batch: SpeechBatch, frames: Tensor, lengths: Tensor) -> Tensor:
        ids = batch.ids
        before = torch.cat([ids.new_full((len(ids), 1), self.bos), ids], 1)
        after = torch.cat([ids, ids.new_zeros(len(ids), 1)], 1).scatter(1, batch.id_lengths[:, None], self.eos)
        logits = self.model.decode(before, frames, padding(lengths, frames.shape[1]))
        return token_loss(logits, after, padding(batch.id_lengths + 1, ids.shape[1] + 1), 0.1)
