"""Bases of recognizers with a text decoder: all, and those without CTC."""

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import padding
from multimodal.models.text import TextTransformer


class SpeechModel(nn.Module):
    """Speech encoder and text decoder with cross-attention."""

    config: Any
    encoder: nn.Module
    decoder: TextTransformer | None

    def encode(
        self, features: Float[Tensor, "B F *M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Bool[Tensor, "B T"], Int[Tensor, "B"]]:
        """Encoder frames, their validity mask and their lengths."""
        frames, lengths = self.encoder(features, lengths)
        return frames, padding(lengths, frames.shape[1]), lengths

    def decode(
        self, ids: Int[Tensor, "B T"], frames: Float[Tensor, "P S D"], valid: Bool[Tensor, "P S"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        """Next-token logits of the decoder."""
        return self.decoder(ids, frames, valid, cache=cache)


class SpeechSeq2Seq(SpeechModel):
    """Recognizer without CTC. `config` has `end_id`, of the end of a text."""

    def forward(
        self, features: Float[Tensor, "B F *M"], lengths: Int[Tensor, "B"], ids: Int[Tensor, "B L"]
    ) -> Float[Tensor, "B L V"]:
        frames, valid, _ = self.encode(features, lengths)
        return self.decode(ids, frames, valid)
