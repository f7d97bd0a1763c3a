"""Image captioner: a ViT encoder and a text decoder with cross-attention to its patches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT, ViTConfig

Decoding = tuple[Callable[[Tensor, Cache], Tensor], Cache]


@runtime_checkable
class CaptionModel(Protocol):
    """Interface of models that write captions."""

    @property
    def caption_context(self) -> int:
        """Maximum number of tokens of a caption, with begin and end."""

    def encode(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B S _"]:
        """The tokens that the decoder attends to."""

    def decoding(self, source: Float[Tensor, "P S _"]) -> Decoding:
        """A step for `multimodal.decoding.sampling` and an empty cache. The step is `step(ids [B T], cache) -> logits
        [B N V]` of the last N ≥ 1 positions; B may be a multiple of P: consecutive rows then share an image."""


@dataclass(frozen=True)
class VisionEncoderDecoderConfig:
    image: ViTConfig
    decoder: TextConfig


class VisionEncoderDecoder(nn.Module):
    """ViT encoder and text decoder; cross-attention sees all image tokens."""

    def __init__(self, config: VisionEncoderDecoderConfig):
        super().__init__()
        self.config = config
        self.image, self.decoder = ViT(config.image), TextTransformer(config.decoder)

    def encode(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B N D"]:
        return self.image.tokens(images)

    @property
    def caption_context(self) -> int:
        return self.config.decoder.context

    def decoding(self, source: Float[Tensor, "P S _"]) -> Decoding:
        return lambda ids, cache: self.decoder(ids, source, cache=cache, last=1), self.decoder.new_cache()

    def forward(
        self, images: Float[Tensor, "B 3 height width"], ids: Int[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        return self.decoder(ids, self.encode(images), valid=valid)
