"""ConvNeXt (Liu et al. 2022)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.layers import FeedForward
from multimodal.models.vision.tower import ChannelNorm, ConvConfig, ConvTower

KERNEL, RATIO, STEM = 7, 4, 4


@dataclass(frozen=True)
class ConvNeXtConfig(ConvConfig):
    """`layers` and `widths` of the four stages."""

    image: tuple[int, int]
    layers: tuple[int, int, int, int]
    widths: tuple[int, int, int, int]
    norm_eps: float

    @property
    def pooled_width(self) -> int:
        return self.widths[-1]


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and a feed-forward on one residual branch."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.conv = nn.Conv2d(width, width, KERNEL, padding=KERNEL // 2, groups=width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.feed = FeedForward(width, RATIO * width, "gelu")
        self.gain = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        branch = self.feed(self.norm(self.conv(x).permute(0, 2, 3, 1))) * self.gain
        return x + branch.permute(0, 3, 1, 2)


class ConvNeXt(ConvTower):
    """Image tower of four stages, with a norm after the mean of all places."""

    def __init__(self, config: ConvNeXtConfig):
        super().__init__()
        self.config = config
        eps, widths = config.norm_eps, config.widths
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], STEM, STEM), ChannelNorm(widths[0], eps=eps))
        self.smaller = nn.ModuleList(
            nn.Sequential(ChannelNorm(one, eps=eps), nn.Conv2d(one, two, 2, 2)) for one, two in pairwise(widths)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(width, eps) for _ in range(count)))
            for width, count in zip(widths, config.layers, strict=True)
        )
        self.norm = nn.LayerNorm(widths[-1], eps=eps)

    def maps(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B D rows columns"]:
        x = self.stages[0](self.stem(images))
        for smaller, stage in zip(self.smaller, self.stages[1:], strict=True):
            x = stage(smaller(x))
        return x

    def pooled(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        return self.norm(tokens.mean(1))
