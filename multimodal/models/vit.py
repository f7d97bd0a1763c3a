"""Vision transformer (Dosovitskiy et al. 2021) with the options of CLIP, SigLIP, DeiT and DINO."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.layers import ACTIVATIONS, FeedForward
from multimodal.blocks.masks import key_mask, padding
from multimodal.blocks.positions import GridRotary, Rotation, interpolate_grid
from multimodal.blocks.sdpa import preferred_kernels
from multimodal.blocks.stack import Stack, StackConfig
from multimodal.models.vision.tower import ConvNorm

STEM_STRIDES = (4, 2)


@dataclass(frozen=True)
class ViTConfig:
    """`image`: (height, width) in pixels at which the positions were learned; `patch`: side in pixels.

    `pool`: `token` (class token), `mean` (patches), `map` (attention pooling, Zhai et al. 2022), `both` (class token
    beside the mean of the patches: DINOv2's classifiers), `pair` (mean of class and distillation token, the first
    register, with a head for each: DeiT) or `none`. `pool_map`: activation of a linear map after it (Hugging Face's
    poolers). `pool_heads`, `pool_hidden`, `pool_activation`: of map pooling; None: as the blocks'.
    `norm_after_pool`: the final norm follows pooling (timm's fc_norm); `stem_norm`: CLIP's first norm;
    `positions_on_prefix`: class token and registers have positions too, `positions_on_registers` False: not these;
    `map_prefix`: map pooling includes them; `classes` 0: no head. `positions`: a learned table; `position_offset`,
    `position_mode`: how it is interpolated, see `interpolate_grid`. `rotary`: of queries and keys of the patches.
    `conv_stem`: width of two convolutions before the patches' map (MobileCLIP-B); 0: none."""

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
    positions_on_registers: bool = True
    position_offset: float | None = None
    position_mode: str = "bicubic"
    positions: bool = True
    rotary: GridRotary | None = None
    pool_map: str | None = None
    pool_heads: int | None = None
    pool_hidden: int | None = None
    pool_activation: str | None = None
    conv_stem: int = 0

    @property
    def pooled_width(self) -> int:
        return self.width * (2 if self.pool == "both" else 1)

    @property
    def fixed(self) -> bool:
        """True if no other image size fits."""
        return self.stack.block.attention.grid is not None

    @property
    def width(self) -> int:
        return self.stack.block.attention.width

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch, self.image[1] // self.patch

    @property
    def positioned(self) -> int:
        """Tokens before the patches that have positions."""
        return (self.prefix if self.positions_on_registers else int(self.class_token)) * self.positions_on_prefix

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
        self.attention = Attention(AttentionConfig(config.width, config.pool_heads or block.attention.heads))
        self.norm = nn.LayerNorm(config.width, eps=block.norm_eps)
        activation = config.pool_activation or block.activation
        self.feed = FeedForward(config.width, config.pool_hidden or block.hidden, activation)

    def forward(self, tokens: Float[Tensor, "B N D"], valid: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B D"]:
        mask = None if valid is None else key_mask(valid)
        x = self.attention(self.query.expand(tokens.shape[0], -1, -1), tokens, mask=mask)
        return (x + self.feed(self.norm(x)))[:, 0]


class ViT(nn.Module):
    """Patch embedding, positions, a stack, pooling and an optional head."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        rows, columns = config.grid
        width, eps = config.width, config.stack.block.norm_eps
        self.conv_stem = _conv_stem(config.channels, config.conv_stem) if config.conv_stem else None
        side = config.patch // (math.prod(STEM_STRIDES) if config.conv_stem else 1)
        self.embed = nn.Conv2d(config.conv_stem or config.channels, width, side, side, bias=config.patch_bias)
        self.class_token = nn.Parameter(torch.zeros(1, width)) if config.class_token else None
        self.registers = nn.Parameter(torch.zeros(config.registers, width)) if config.registers else None
        known = rows * columns + config.positioned
        self.positions = nn.Parameter(torch.empty(known, width).normal_(std=0.02)) if config.positions else None
        self.stem_norm = nn.LayerNorm(width, eps=eps) if config.stem_norm else None
        self.stack = Stack(config.stack)
        self.pool = MapPool(config) if config.pool == "map" else None
        self.norm = nn.LayerNorm(width, eps=eps) if config.norm_after_pool else None
        self.pool_map = nn.Linear(config.pooled_width, config.pooled_width) if config.pool_map else None
        head = partial(nn.Linear, config.pooled_width, config.classes, bias=config.head_bias)
        self.head = head() if config.classes else None
        self.distilled_head = head() if config.classes and config.pool == "pair" else None

    def stem(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B N D"]:
        """Prefix tokens and patches, with positions interpolated to the image's size."""
        height, width = images.shape[-2:]
        patch = self.config.patch
        if self.config.fixed and (height, width) != self.config.image:
            raise ValueError(
                f"image size must be {self.config.image}, which relative positions fit (got {height}x{width})"
            )
        # SigLIP has 384 pixels with patch 14: at that size the remainder is dropped
        if (height % patch or width % patch) and (height, width) != self.config.image:
            raise ValueError(f"image size must be a multiple of the patch {patch} (got {height}x{width})")
        x = self.embed(images if self.conv_stem is None else self.conv_stem(images)).flatten(2).transpose(1, 2)
        prefix = [t for t in (self.class_token, self.registers) if t is not None]
        if prefix:
            x = torch.cat([torch.cat(prefix).expand(x.shape[0], -1, -1).to(x.dtype), x], 1)
        if self.positions is not None:
            x = x + self.grid_positions(self._grid(images)).to(x.dtype)
        return x if self.stem_norm is None else self.stem_norm(x)

    def grid_positions(self, grid: tuple[int, int]) -> Float[Tensor, "N D"]:
        """Positions of the prefix, then of a grid of patches row by row, interpolated from the learned grid."""
        config, own = self.config, self.config.positioned
        table = interpolate_grid(
            self.positions[own:], self.config.grid, grid, config.position_offset, config.position_mode
        )
        missing = table.new_zeros(self.config.prefix - own, table.shape[1])
        return torch.cat([self.positions[:own], missing, table])

    def rotation(
        self, grid: tuple[int, int], device: torch.device, keep: Int[Tensor, "B n"] | None = None
    ) -> Rotation | None:
        """Rotation of queries and keys, the prefix as it is. `keep`: see `tokens`."""
        if self.config.rotary is None:
            return None
        angles = self._angles(grid, device)
        if keep is not None:
            own = self.config.prefix
            angles = torch.cat([angles[:own].expand(keep.shape[0], -1, -1), angles[own:][keep]], 1)
        return Rotation(angles, self.config.rotary.interleaved)

    def _angles(self, grid: tuple[int, int], device: torch.device) -> Float[Tensor, "N R"]:
        angles = self.config.rotary.angles(grid, self.config.stack.block.attention.head_size)
        return nn.functional.pad(angles, (0, 0, self.config.prefix, 0)).to(device)

    def _grid(self, image: Tensor) -> tuple[int, int]:
        height, width = image.shape[-2:]
        return height // self.config.patch, width // self.config.patch

    def tokens(
        self, images: Float[Tensor, "B 3 height width"], keep: Tensor | None = None,
        states: list[Tensor] | None = None, first: bool = False, layers: int | None = None,
    ) -> Float[Tensor, "B N D"]:  # fmt: skip
        """All tokens after the stack, prefix first, or only the `first`. `keep` [B n]: indices of the patches to keep
        (patch dropout, Li et al. 2023). `states`, `layers`: see `Stack`."""
        x = self.stem(images)
        if keep is not None:
            own = self.config.prefix
            patches = x[:, own:].gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
            x = torch.cat([x[:, :own], patches], 1)
        with preferred_kernels(x):
            only = x.new_zeros(x.shape[0], dtype=torch.long) if first else None
            rotate = self.rotation(self._grid(images), x.device, keep)
            return self.stack(x, states=states, only=only, layers=layers, rotate=rotate)

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
        rotate = None
        if self.config.rotary is not None:
            angles = [self._angles(self._grid(image), x.device) for image in images]
            angles = nn.utils.rnn.pad_sequence(angles, batch_first=True)
            rotate = Rotation(angles, self.config.rotary.interleaved)
        x = self.stack(x, mask=None if valid is None else key_mask(valid), only=only, rotate=rotate)
        return x, None if first else valid

    def pooled(self, tokens: Float[Tensor, "B N D"], valid: Bool[Tensor, "B N"] | None = None) -> Float[Tensor, "B P"]:
        """One vector per image from its `valid` tokens, before the head. Raises ValueError with `pool` `none`."""
        if self.config.pool == "none":
            raise ValueError("a model with pool 'none' has no pooled vector; use tokens()")
        if self.pool is not None:
            start = 0 if self.config.map_prefix else self.config.prefix
            x = self.pool(tokens[:, start:], None if valid is None else valid[:, start:])
        elif self.config.pool in ("mean", "both"):
            patches = tokens[:, self.config.prefix :]
            x = patches.mean(1) if valid is None else _mean(patches, valid[:, self.config.prefix :])
            x = x if self.config.pool == "mean" else torch.cat([tokens[:, 0], x], -1)
        else:
            x = tokens[:, :2].mean(1) if self.config.pool == "pair" else tokens[:, 0]
        x = x if self.norm is None else self.norm(x)
        return x if self.pool_map is None else ACTIVATIONS[self.config.pool_map](self.pool_map(x))

    def features(
        self, images: Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]], keep: Tensor | None = None
    ) -> Float[Tensor, "B D"]:
        """Pooled vectors of a batch of images, or of a sequence of images of different sizes."""
        return self.pooled(*self._outputs(images, keep, first=self.config.pool == "token" and not self.config.fixed))

    def _outputs(
        self, images: Tensor | Sequence[Tensor], keep: Tensor | None, first: bool
    ) -> tuple[Float[Tensor, "B N D"], Bool[Tensor, "B N"] | None]:
        """Tokens and their validity."""
        return (
            (self.tokens(images, keep, first=first), None) if isinstance(images, Tensor) else self.ragged(images, first)
        )

    def forward(
        self, images: Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]], keep: Tensor | None = None
    ) -> Float[Tensor, "B classes"]:
        """Class logits, or pooled vectors without a head."""
        if self.distilled_head is not None:
            tokens, _ = self._outputs(images, keep, first=False)
            return (self.head(tokens[:, 0]) + self.distilled_head(tokens[:, 1])) / 2
        x = self.features(images, keep)
        return x if self.head is None else self.head(x)


def _conv_stem(channels: int, width: int) -> nn.Sequential:
    convolutions = [ConvNorm(before, width, stride, stride, padding=0)
                    for before, stride in zip((channels, width), STEM_STRIDES, strict=True)]  # fmt: skip
    return nn.Sequential(*(part for one in convolutions for part in (one, nn.GELU())))


def _mean(patches: Float[Tensor, "B N D"], valid: Bool[Tensor, "B N"]) -> Float[Tensor, "B D"]:
    return torch.where(valid[..., None], patches, 0).sum(1) / valid.sum(1, keepdim=True)
