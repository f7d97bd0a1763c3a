"""GIT: a text decoder with the image's tokens as prefix (Wang et al. 2022)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import key_mask, prefix
from multimodal.models.captioner import Decoding
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT, ViTConfig


@dataclass(frozen=True)
class GITConfig:
    """`decoder.context`: text positions; image tokens have none."""

    image: ViTConfig
    decoder: TextConfig


class GIT(nn.Module):
    """Image tokens see each other; a text token sees them and the text before it."""

    def __init__(self, config: GITConfig):
        super().__init__()
        self.config = config
        self.image, self.decoder = ViT(config.image), TextTransformer(config.decoder)
        width = config.decoder.width
        self.project = nn.Linear(config.image.width, width)
        self.project_norm = nn.LayerNorm(width, eps=config.image.stack.block.norm_eps)

    @property
    def caption_context(self) -> int:
        return self.config.decoder.context

    def encode(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B S D"]:
        return self.project_norm(self.project(self.image.tokens(images)))

    def decoding(self, source: Float[Tensor, "P S D"]) -> Decoding:
        # a cache without `start`: all rows have the same length
        return lambda ids, cache: self._logits(ids, source, cache, last=1), Cache(self.config.decoder.stack.layers)

    def forward(
        self, images: Float[Tensor, "B 3 height width"], ids: Int[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        """Next-token logits; `valid` marks real tokens of right-padded rows."""
        return self._logits(ids, self.encode(images), valid=valid)

    def _logits(
        self, ids: Int[Tensor, "B T"], source: Float[Tensor, "P S D"], cache: Cache | None = None,
        valid: Bool[Tensor, "B T"] | None = None, last: int | None = None,
    ) -> Float[Tensor, "B N V"]:  # fmt: skip
        size, past = source.shape[1], cache.length if cache else 0
        x = self.decoder.stem(ids, max(past - size, 0))
        if not past:
            x = torch.cat([source.repeat_interleave(ids.shape[0] // source.shape[0], 0), x], 1)
            valid = None if valid is None else torch.cat([valid.new_ones(ids.shape[0], size), valid], 1)
        mask = prefix(x.shape[1], past + x.shape[1], size, ids.device) if x.shape[1] > 1 else None
        if valid is not None:
            mask = mask & key_mask(valid)
        states = self.decoder.stack(x, mask=mask, valid=valid, cache=cache)
        return self.decoder.logits(states[:, -(last or ids.shape[1]) :])
