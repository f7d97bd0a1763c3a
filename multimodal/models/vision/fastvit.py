"""FastViT (Vasu et al. 2023) as MobileCLIP's MCi towers: parallel convolutions that are summed, then attention where
maps are small."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.models.vision.tower import ChannelNorm, ConvConfig, ConvNorm, ConvTower

HEAD_WIDTH, LARGE, MIXER, SMALL = 32, 7, 3, 3
LAYER_EPS = 1e-5


@dataclass(frozen=True)
class FastViTConfig(ConvConfig):
    """`layers` and `widths` of each stage; `ratio` of their feed-forwards' inner width. `attends`: stages that attend,
    after positions by convolution; `squeezes`: stages whose first convolution gates its channels. `norm` before
    attention: `batch` or `layer`. `stem_scale`: the stem has 1x1 branches."""

    image: tuple[int, int]
    layers: tuple[int, ...]
    widths: tuple[int, ...]
    ratio: int
    attends: tuple[bool, ...]
    squeezes: tuple[bool, ...]
    norm: str
    stem_scale: bool

    @property
    def patch(self) -> int:  # type: ignore[override]
        return 2 ** (1 + len(self.layers))

    @property
    def pooled_width(self) -> int:
        return 2 * self.widths[-1]


class Squeeze(nn.Module):
    """Gate each channel by a map of all channels' means (Hu et al. 2018)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        return x * self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class Branches(nn.Module):
    """MobileOne's sum of a convolution, a pointwise one and a norm of the input itself (Vasu et al. 2022)."""

    def __init__(self, width: int, out: int, kernel: int, stride: int = 1, groups: int = 1, scale: bool = True,
                 conv: bool = True):  # fmt: skip
        super().__init__()
        self.identity = nn.BatchNorm2d(width) if width == out and stride == 1 else None
        self.conv = ConvNorm(width, out, kernel, stride, groups) if conv else None
        self.scale = ConvNorm(width, out, 1, stride, groups) if scale and kernel > 1 else None

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D _ _"]:
        return sum(part(x) for part in (self.scale, self.identity, self.conv) if part is not None)


class Smaller(nn.Module):
    """Half the size, by a large and a small convolution, then a pointwise one."""

    def __init__(self, width: int, out: int, squeeze: bool):
        super().__init__()
        self.large, self.small = (ConvNorm(width, out, kernel, 2, width) for kernel in (LARGE, SMALL))
        self.squeeze = Squeeze(out, out // 4) if squeeze else None
        self.point = Branches(out, out, 1)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D _ _"]:
        x = self.large(x) + self.small(x)
        return F.gelu(self.point(F.gelu(x if self.squeeze is None else self.squeeze(x))))


class ConvFeedForward(nn.Module):
    """A depthwise convolution, then a feed-forward at each place."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.mix = ConvNorm(width, width, LARGE, groups=width)
        self.up, self.down = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        return self.down(F.gelu(self.up(self.mix(x))))


class FastViTBlock(nn.Module):
    """Mix places by convolutions (RepMixer) or by attention, then the channels."""

    def __init__(self, width: int, config: FastViTConfig, attends: bool):
        super().__init__()
        self.norm = self.attention = self.mixer = None
        if attends:
            self.norm = nn.BatchNorm2d(width) if config.norm == "batch" else ChannelNorm(width, eps=LAYER_EPS)
            self.attention = Attention(AttentionConfig(width, width // HEAD_WIDTH, qkv_bias=False))
        else:
            self.norm = Branches(width, width, MIXER, scale=False, conv=False)
            self.mixer = Branches(width, width, MIXER, groups=width)
        self.feed = ConvFeedForward(width, config.ratio * width)
        self.mix_gain, self.feed_gain = (nn.Parameter(torch.full((width, 1, 1), 1e-5)) for _ in range(2))

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        x = x + self.mix_gain * self._mixed(x)
        return x + self.feed_gain * self.feed(x)

    def _mixed(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        normed = self.norm(x)
        if self.attention is None:
            return self.mixer(x) - normed
        return self.attention(normed.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


class FastViTStage(nn.Module):
    """Half the size (but in the first stage), positions, blocks."""

    def __init__(self, before: int, index: int, config: FastViTConfig):
        super().__init__()
        width, attends = config.widths[index], config.attends[index]
        self.smaller = Smaller(before, width, config.squeezes[index]) if index else None
        self.positions = nn.Conv2d(width, width, LARGE, padding=LARGE // 2, groups=width) if attends else None
        self.blocks = nn.Sequential(*(FastViTBlock(width, config, attends) for _ in range(config.layers[index])))

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D _ _"]:
        x = x if self.smaller is None else self.smaller(x)
        return self.blocks(x if self.positions is None else x + self.positions(x))


class FastViT(ConvTower):
    """Image tower of MobileCLIP's S sizes."""

    def __init__(self, config: FastViTConfig):
        super().__init__()
        self.config = config
        first, last = config.widths[0], config.widths[-1]
        self.stem = nn.ModuleList(
            [Branches(3, first, 3, 2, scale=config.stem_scale),
             Branches(first, first, 3, 2, first, scale=config.stem_scale), Branches(first, first, 1)]
        )  # fmt: skip
        befores = (first, *config.widths)
        self.stages = nn.Sequential(*(FastViTStage(befores[i], i, config) for i in range(len(config.widths))))
        self.last = Branches(last, 2 * last, 3, groups=last)
        self.squeeze = Squeeze(2 * last, 2 * last // 16)

    def maps(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B D rows columns"]:
        x = images
        for part in self.stem:
            x = F.gelu(part(x))
        return F.gelu(self.squeeze(self.last(self.stages(x))))
