"""CLIP's ModifiedResNet (Radford et al. 2021, section 2.4): three convolutions for a stem, average pools where a ResNet
has strides (Zhang 2019), and attention pooling."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.models.vision.tower import ConvConfig, ConvNorm, ConvTower

EXPANSION = 4


@dataclass(frozen=True)
class ResNetConfig(ConvConfig):
    """`layers`: blocks of each stage; `width` of the first; `heads` of the pool, whose output has `embed` channels."""

    image: tuple[int, int]
    layers: tuple[int, int, int, int]
    width: int
    heads: int
    embed: int

    fixed, pool = True, "attention"

    @property
    def pooled_width(self) -> int:
        return self.embed


class Bottleneck(nn.Module):
    """Residual block (He et al. 2016) whose stride is an average pool."""

    def __init__(self, width: int, inner: int, stride: int):
        super().__init__()
        self.stride = stride
        self.reduce, self.mix = ConvNorm(width, inner), ConvNorm(inner, inner, 3)
        self.expand = ConvNorm(inner, inner * EXPANSION)
        same = stride == 1 and width == inner * EXPANSION
        self.shortcut = None if same else ConvNorm(width, inner * EXPANSION)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D _ _"]:
        branch = F.relu(self.mix(F.relu(self.reduce(x))))
        branch = self.expand(self._smaller(branch))
        return F.relu(branch + (x if self.shortcut is None else self.shortcut(self._smaller(x))))

    def _smaller(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C _ _"]:
        return x if self.stride == 1 else F.avg_pool2d(x, self.stride)


class MeanQueryPool(nn.Module):
    """The mean of all places attends to itself and to them."""

    def __init__(self, positions: int, width: int, heads: int, out: int):
        super().__init__()
        self.positions = nn.Parameter(torch.empty(positions + 1, width).normal_(std=width**-0.5))
        self.attention = Attention(AttentionConfig(width, heads, out_width=out))

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B P"]:
        x = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + self.positions.to(tokens.dtype)
        return self.attention(x[:, :1], x)[:, 0]


class ModifiedResNet(ConvTower):
    """Image tower of CLIP's RN50 to RN50x64."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.stem = nn.ModuleList(
            [ConvNorm(3, width // 2, 3, 2), ConvNorm(width // 2, width // 2, 3), ConvNorm(width // 2, width, 3)]
        )
        self.stages, last = nn.ModuleList(), width
        for stage, count in enumerate(config.layers):
            inner, blocks = width * 2**stage, nn.Sequential()
            for block in range(count):
                blocks.append(Bottleneck(last, inner, 2 if stage and not block else 1))
                last = inner * EXPANSION
            self.stages.append(blocks)
        rows, columns = config.grid
        self.pool = MeanQueryPool(rows * columns, last, config.heads, config.embed)

    def maps(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B D rows columns"]:
        x = images
        for part in self.stem:
            x = F.relu(part(x))
        x = F.avg_pool2d(x, 2)
        for stage in self.stages:
            x = stage(x)
        return x

    def pooled(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B P"]:
        return self.pool(tokens)
