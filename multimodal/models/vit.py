"""Vision transformer (Dosovitskiy et al. 2021) with the options that CLIP, SigLIP, DeiT and DINO use."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.layers import FeedForward
from multimodal.blocks.positions import interpolate_grid
from multimodal.blocks.stack import Stack, StackConfig


@dataclass(frozen=True)
class ViTConfig:
    """`image` (height, width) in pixels at which the positions were learned; `patch` side in pixels.

    `pool`: `token` (class token), `mean` (patches), `map` (attention pooling, Zhai et al. 2022) or `none`.
    `norm_after_pool`: the final norm follows pooling (timm's fc_norm); `stem_norm`: CLIP's first norm;
    `positions_on_prefix`: the class token and registers have positions too; `map_prefix`: map pooling looks at
    them too; `classes` 0: no head."""

    image: tuple[int, int]
    patch: int
    stack: StackConfig
    pool: str
    class_token: bool
    registers: int = 0
    positions_on_prefix: bool = True
    patch_bias: bool = True
    stem_norm: bool = False
    norm_after_pool: bool = False
    head_bias: bool = True
    classes: int = 0
    channels: int = 3
    map_prefix: bool = True

    @property
    def width(self) -> int:
        return self.stack.block.attention.width

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch, self.image[1] // self.patch

    @property
    def prefix(self) -> int:
        """Tokens before the patches."""
        return int(self.class_token) + self.registers


class MapPool(nn.Module):
    """One learned query attends to all tokens, then a residual feed-forward (Zhai et al. 2022; SigLIP)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        block = config.stack.block
        self.query = nn.Parameter(torch.zeros(1, 1, config.width))
        self.attention = Attention(AttentionConfig(config.width, block.attention.heads))
        self.norm = nn.LayerNorm(config.width, eps=block.norm_eps)
        self.feed = FeedForward(config.width, block.hidden, block.activation)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        x = self.attention(self.query.expand(len(tokens), -1, -1), tokens)
        return (x + self.feed(self.norm(x)))[:, 0]


class ViT(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        rows, columns = config.grid
        width, eps = config.width, config.stack.block.norm_eps
        self.embed = nn.Conv2d(config.channels, width, config.patch, config.patch, bias=config.patch_bias)
        self.class_token = nn.Parameter(torch.zeros(1, width)) if config.class_token else None
        self.registers = nn.Parameter(torch.zeros(config.registers, width)) if config.registers else None
        known = rows * columns + (config.prefix if config.positions_on_prefix else 0)
        self.positions = nn.Parameter(torch.empty(known, width).normal_(std=0.02))
        self.stem_norm = nn.LayerNorm(width, eps=eps) if config.stem_norm else None
        self.stack = Stack(config.stack)
        self.pool = MapPool(config) if config.pool == "map" else None
        self.norm = nn.LayerNorm(width, eps=eps) if config.norm_after_pool else None
        self.head = nn.Linear(width, config.classes, bias=config.head_bias) if config.classes else None

    def stem(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B N D"]:
        """Patches, prefix tokens and positions, which are interpolated when the image has another size."""
        height, width = images.shape[-2:]
        patch = self.config.patch
        # a model learned at a size that is no multiple (SigLIP: 384 with patch 14) drops the rest at that size
        if (height % patch or width % patch) and (height, width) != self.config.image:
            raise ValueError(f"image size {height}x{width} is not a multiple of the patch {patch}")
        x = self.embed(images).flatten(2).transpose(1, 2)
        prefix = [t for t in (self.class_token, self.registers) if t is not None]
        if prefix:
            x = torch.cat([torch.cat(prefix).expand(len(x), -1, -1).to(x.dtype), x], 1)
        x = x + self.grid_positions((height // patch, width // patch)).to(x.dtype)
        return x if self.stem_norm is None else self.stem_norm(x)

    def grid_positions(self, grid: tuple[int, int]) -> Float[Tensor, "N D"]:
        own = self.config.prefix if self.config.positions_on_prefix else 0
        table = interpolate_grid(self.positions[own:], self.config.grid, grid)
        missing = table.new_zeros(self.config.prefix - own, table.shape[1])
        return torch.cat([missing, self.positions[:own], table])

    def tokens(
        self, images: Float[Tensor, "B 3 height width"], keep: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> Float[Tensor, "B N D"]:  # fmt: skip
        """All tokens after the stack, prefix first. `keep` [B n]: indices of the patches to look at
        (patch dropout, Li et al. 2023)."""
        x = self.stem(images)
        if keep is not None:
            own = self.config.prefix
            patches = x[:, own:].gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
            x = torch.cat([x[:, :own], patches], 1)
        return self.stack(x, states=states)

    def pooled(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        """One vector a picture, before the head. Raises ValueError for a model that does not pool."""
        if self.config.pool == "none":
            raise ValueError("this model does not pool its tokens (pool 'none'); use tokens()")
        if self.pool is not None:
            x = self.pool(tokens if self.config.map_prefix else tokens[:, self.config.prefix :])
        elif self.config.pool == "mean":
            x = tokens[:, self.config.prefix :].mean(1)
        else:
            x = tokens[:, 0]
        return x if self.norm is None else self.norm(x)

    def forward(
        self, images: Float[Tensor, "B 3 height width"], keep: Tensor | None = None
    ) -> Float[Tensor, "B classes"]:
        """Class logits, or the pooled vector where there is no head."""
        x = self.pooled(self.tokens(images, keep))
        return x if self.head is None else self.head(x)
