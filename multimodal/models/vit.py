"""Vision transformer (Dosovitskiy et al. 2021) with the options of CLIP, SigLIP, DeiT and DINO."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.layers import FeedForward
from multimodal.blocks.masks import key_mask, padding
from multimodal.blocks.positions import interpolate_grid
from multimodal.blocks.sdpa import preferred_kernels
from multimodal.blocks.stack import Stack, StackConfig


@dataclass(frozen=True)
class ViTConfig:
    """`image`: (height, width) in pixels at which the positions were learned; `patch`: side in pixels.

    `pool`: `token` (class token), `mean` (patches), `map` (attention pooling, Zhai et al. 2022) or `none`.
    `norm_after_pool`: the final norm follows pooling (timm's fc_norm); `stem_norm`: CLIP's first norm;
    `positions_on_prefix`: class token and registers have positions too; `map_prefix`: map pooling includes them;
    `classes` 0: no head. `position_offset`: how positions are interpolated, see `interpolate_grid`."""

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
    position_offset: float | None = None

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

    def forward(self, tokens: Float[Tensor, "B N D"], valid: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B D"]:
        mask = None if valid is None else key_mask(valid)
        x = self.attention(self.query.expand(len(tokens), -1, -1), tokens, mask=mask)
        return (x + self.feed(self.norm(x)))[:, 0]


class ViT(nn.Module):
    """Patch embedding, positions, a stack, pooling and an optional head."""

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
        """Prefix tokens and patches, with positions interpolated to the image's size."""
        height, width = images.shape[-2:]
        patch = self.config.patch
        # SigLIP has 384 pixels with patch 14: at that size the remainder is dropped
        if (height % patch or width % patch) and (height, width) != self.config.image:
            raise ValueError(f"image size must be a multiple of the patch {patch} (got {height}x{width})")
        x = self.embed(images).flatten(2).transpose(1, 2)
        prefix = [t for t in (self.class_token, self.registers) if t is not None]
        if prefix:
            x = torch.cat([torch.cat(prefix).expand(len(x), -1, -1).to(x.dtype), x], 1)
        x = x + self.grid_positions((height // patch, width // patch)).to(x.dtype)
        return x if self.stem_norm is None else self.stem_norm(x)

    def grid_positions(self, grid: tuple[int, int]) -> Float[Tensor, "N D"]:
        """Positions of the prefix, then of a grid of patches row by row, interpolated from the learned grid."""
        own = self.config.prefix if self.config.positions_on_prefix else 0
        table = interpolate_grid(self.positions[own:], self.config.grid, grid, self.config.position_offset)
        missing = table.new_zeros(self.config.prefix - own, table.shape[1])
        return torch.cat([missing, self.positions[:own], table])

    def tokens(
        self, images: Float[Tensor, "B 3 height width"], keep: Tensor | None = None,
        states: list[Tensor] | None = None, first: bool = False, layers: int | None = None,
    ) -> Float[Tensor, "B N D"]:  # fmt: skip
        """All tokens after the stack, prefix first, or only the `first`. `keep` [B n]: indices of the patches to keep
        (patch dropout, Li et al. 2023). `layers`: see `Stack`."""
        x = self.stem(images)
        if keep is not None:
            own = self.config.prefix
            patches = x[:, own:].gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
            x = torch.cat([x[:, :own], patches], 1)
        with preferred_kernels(x):
            only = x.new_zeros(len(x), dtype=torch.long) if first else None
            return self.stack(x, states=states, only=only, layers=layers)

    def ragged(
        self, images: Sequence[Float[Tensor, "3 _ _"]], first: bool = False
    ) -> tuple[Float[Tensor, "B N D"], Bool[Tensor, "B N"] | None]:
        """All tokens of images of several sizes, or only the `first`, right-padded, and their validity mask (None:
        all). Valid tokens equal the image's own `tokens`."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, image in enumerate(images):
            groups.setdefault(tuple(image.shape), []).append(row)
        stems = {row: x for rows in groups.values()
                 for row, x in zip(rows, self.stem(torch.stack([images[r] for r in rows])), strict=True)}  # fmt: skip
        x = nn.utils.rnn.pad_sequence([stems[row] for row in range(len(images))], batch_first=True)
        lengths = torch.tensor([len(stems[row]) for row in range(len(images))], device=x.device)
        valid = None if (lengths == x.shape[1]).all() else padding(lengths, x.shape[1])
        only = torch.zeros_like(lengths) if first else None
        x = self.stack(x, mask=None if valid is None else key_mask(valid), only=only)
        return x, None if first else valid

    def pooled(self, tokens: Float[Tensor, "B N D"], valid: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B D"]:
        """One vector per image from its `valid` tokens, before the head. Raises ValueError with `pool` `none`."""
        if self.config.pool == "none":
            raise ValueError("a model with pool 'none' has no pooled vector; use tokens()")
        if self.pool is not None:
            start = 0 if self.config.map_prefix else self.config.prefix
            x = self.pool(tokens[:, start:], None if valid is None else valid[:, start:])
        elif self.config.pool == "mean":
            patches = tokens[:, self.config.prefix :]
            x = patches.mean(1) if valid is None else _mean(patches, valid[:, self.config.prefix :])
        else:
            x = tokens[:, 0]
        return x if self.norm is None else self.norm(x)

    def features(
        self, images: Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]], keep: Tensor | None = None
    ) -> Float[Tensor, "B D"]:
        """Pooled vectors of a batch of images, or of a sequence of images of different sizes."""
        first = self.config.pool == "token"
        if isinstance(images, Tensor):
            return self.pooled(self.tokens(images, keep, first=first))
        return self.pooled(*self.ragged(images, first))

    def forward(
        self, images: Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]], keep: Tensor | None = None
    ) -> Float[Tensor, "B classes"]:
        """Class logits, or pooled vectors without a head."""
        x = self.features(images, keep)
        return x if self.head is None else self.head(x)


def _mean(patches: Float[Tensor, "B N D"], valid: Bool[Tensor, "B N"]) -> Float[Tensor, "B D"]:
    return torch.where(valid[..., None], patches, 0).sum(1) / valid.sum(1, keepdim=True)
