"""Image captioner: a ViT encoder and a text decoder that attends to its patches."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.models.text import TextConfig, TextTransformer
from multimodal.models.vit import ViT, ViTConfig


@dataclass(frozen=True)
class CaptionerConfig:
    image: ViTConfig
    decoder: TextConfig


class Captioner(nn.Module):
    """The decoder's cross-attention sees all image tokens."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        self.config = config
        self.image, self.decoder = ViT(config.image), TextTransformer(config.decoder)

    def encode(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B N D"]:
        return self.image.tokens(images)

    def forward(
        self, images: Float[Tensor, "B 3 height width"], ids: Int[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        return self.decoder(ids, self.encode(images), valid=valid)
