"""wav2vec 2.0's encoder (Baevski et al. 2020), also of HuBERT and WavLM: strided convolutions over samples, a
convolution for positions, and a stack."""

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.conformer import zero_padding
from multimodal.blocks.masks import key_mask, padding
from multimodal.blocks.positions import BucketBias, GatedBias, relative_distances
from multimodal.blocks.sdpa import preferred_kernels
from multimodal.blocks.stack import Stack, StackConfig
from multimodal.tokens.audio.log_mel import RATE


@dataclass(frozen=True)
class WaveEncoderConfig:
    """`channels`, `kernels`, `strides` of the convolutions. `conv_norm`: `layer` after each, or `group`, over time,
    after the first. `position_kernel`, `position_groups`: of the positions' convolution. `buckets`, `furthest`: of
    WavLM's gated bias for distances (0: none). `features`: see `tokens.audio.features.speech_features`."""

    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    conv_norm: str
    conv_bias: bool
    stack: StackConfig
    position_kernel: int
    position_groups: int
    features: str
    project_norm: bool = True
    buckets: int = 0
    furthest: int = 0

    bands = 0  # takes samples
    chunk = 0  # a frame depends on the whole recording

    def __post_init__(self) -> None:
        if not len(self.channels) == len(self.kernels) == len(self.strides):
            raise ValueError("channels, kernels and strides must be equally many")

    @property
    def width(self) -> int:
        return self.stack.block.attention.width

    @property
    def seconds(self) -> float:
        """Time between states."""
        return prod(self.strides) / RATE

    @property
    def least(self) -> int:
        """Samples of one state."""
        samples = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return samples


class WaveConvolution(nn.Module):
    """A strided convolution over samples without padding, a norm and GELU."""

    def __init__(self, source: int, config: WaveEncoderConfig, number: int):
        super().__init__()
        width = config.channels[number]
        self.conv = nn.Conv1d(source, width, config.kernels[number], config.strides[number], bias=config.conv_bias)
        over_time = config.conv_norm == "group" and number == 0
        self.norm = nn.GroupNorm(width, width) if over_time else None
        if config.conv_norm == "layer":
            self.norm = nn.LayerNorm(width)

    def forward(
        self, x: Float[Tensor, "B C T"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B D S"], Int[Tensor, "B"]]:
        x = self.conv(x)
        lengths = (lengths - self.conv.kernel_size[0]) // self.conv.stride[0] + 1
        if isinstance(self.norm, nn.LayerNorm):
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        elif self.norm is not None:
            x = self._over_time(x, lengths)
        return F.gelu(x), lengths

    def _over_time(self, x: Float[Tensor, "B D S"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B D S"]:
        """Each channel normalized over the frames that are no padding."""
        weight = padding(lengths, x.shape[-1])[:, None].to(x.dtype)
        count = lengths[:, None, None]
        mean = (x * weight).sum(-1, keepdim=True) / count
        variance = ((x - mean) * weight).square().sum(-1, keepdim=True) / count
        scaled = (x - mean) * torch.rsqrt(variance + self.norm.eps)
        return (scaled * self.norm.weight[:, None] + self.norm.bias[:, None]) * weight


class PositionConvolution(nn.Module):
    """Positions from a grouped convolution over neighbours, whose weight has a length for each place in its kernel
    (Salimans and Kingma 2016)."""

    def __init__(self, width: int, kernel: int, groups: int):
        super().__init__()
        self.groups, self.kernel = groups, kernel
        self.length = nn.Parameter(torch.ones(1, 1, kernel))
        self.direction = nn.Parameter(torch.randn(width, width // groups, kernel) * (4 / (kernel * width)) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(width))

    def weight(self) -> Float[Tensor, "D G K"]:
        return self.direction * (self.length / self.direction.norm(dim=(0, 1), keepdim=True))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = F.conv1d(x.transpose(1, 2), self.weight(), self.bias, padding=self.kernel // 2, groups=self.groups)
        x = x[..., :-1] if self.kernel % 2 == 0 else x  # an even kernel sees one more past frame
        return F.gelu(x).transpose(1, 2)


class WaveEncoder(nn.Module):
    """Samples to states."""

    def __init__(self, config: WaveEncoderConfig):
        super().__init__()
        self.config, sources = config, (1, *config.channels)
        self.stem = nn.ModuleList(WaveConvolution(sources[i], config, i) for i in range(len(config.channels)))
        block = config.stack.block
        self.project_norm = nn.LayerNorm(config.channels[-1], block.norm_eps) if config.project_norm else None
        self.project = nn.Linear(config.channels[-1], config.width)
        self.positions = PositionConvolution(config.width, config.position_kernel, config.position_groups)
        self.norm = nn.LayerNorm(config.width, block.norm_eps) if block.post_norm else None
        heads = block.attention.heads
        self.bias = BucketBias(heads, config.buckets, config.furthest) if config.buckets else None
        self.stack = Stack(config.stack)

    def forward(
        self, features: Float[Tensor, "B F"], lengths: Int[Tensor, "B"], states: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """Encoded frames and their number in each row. Padding has no influence; shorter audio is zero-padded to one
        frame."""
        least = self.config.least
        x, lengths = F.pad(features, (0, max(0, least - features.shape[1])))[:, None], lengths.clamp(min=least)
        for convolution in self.stem:
            x, lengths = convolution(x, lengths)
        x = x.transpose(1, 2)
        valid: Bool[Tensor, "B T"] = padding(lengths, x.shape[1])
        x = self.project(x if self.project_norm is None else self.project_norm(x))
        x = zero_padding(x, valid)
        x = x + self.positions(x)
        x = x if self.norm is None else self.norm(x)
        mask = key_mask(valid)
        if self.bias is not None:
            mask = GatedBias(self.bias(relative_distances(x.shape[1], x.shape[1], x.device)), mask)
        with preferred_kernels(x, steady=False):
            x = self.stack(x, mask=mask, valid=valid, states=states)
        return zero_padding(x, valid), lengths
