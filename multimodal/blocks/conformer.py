"""Convolutions before and between attention: patch and frame stems, the Conformer module and block.

What runs over a stream keeps the frames that its next output still needs (`SubsampleStream`, `Tail`)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import LayerCache
from multimodal.blocks.layers import DropPath, FeedForward


def zero_padded(x: Float[Tensor, "B T *D"], valid: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T *D"]:
    """Zeroes padded frames, since a time convolution sees its neighbours and NaN passes through a product."""
    return x if valid is None else torch.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)


class FrameStem(nn.Module):
    """Two convolutions over time of width 3, the second of stride 2, each with GELU (Whisper's stem)."""

    def __init__(self, bands: int, width: int):
        super().__init__()
        self.first = nn.Conv1d(bands, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)

    def forward(self, mel: Float[Tensor, "B M F"]) -> Float[Tensor, "B T D"]:
        return F.gelu(self.second(F.gelu(self.first(mel)))).transpose(1, 2)


class Subsample(nn.Module):
    """Strided 3×3 convolutions over frames and bands, then a projection (Conformer paper, section 2).

    `factor` 4 or 8 halves the frame rate two or three times. From the second convolution on they are
    depthwise-separable, as in FastConformer (Rekesh et al. 2023). Padded frames are zeroed before each."""

    def __init__(self, bands: int, width: int, factor: int, channels: int):
        super().__init__()
        halvings = {2: 1, 4: 2, 8: 3}[factor]
        self.first = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.depthwise = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels) for _ in range(halvings - 1)
        )
        self.pointwise = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(halvings - 1))
        for _ in range(halvings):
            bands = (bands + 1) // 2
        self.project = nn.Linear(channels * bands, width)

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        x = features[:, None]
        for stage in range(len(self.depthwise) + 1):
            x = self.halve(stage, F.pad(self._zeroed(x, lengths), (0, 0, 1, 1)))
            lengths = (lengths + 1) // 2
        return self.flat(x), lengths

    def halve(self, stage: int, x: Float[Tensor, "B C F M"]) -> Float[Tensor, "B D T K"]:
        """One of the convolutions, T = ⌊(F - 1) / 2⌋: the frame before the first and after the last are in `x`."""
        conv = self.depthwise[stage - 1] if stage else self.first
        x = F.conv2d(x, conv.weight, conv.bias, 2, (0, 1), groups=conv.groups)
        return F.relu(self.pointwise[stage - 1](x) if stage else x)

    def flat(self, x: Float[Tensor, "B C T M"]) -> Float[Tensor, "B T D"]:
        """The output frames of the last convolution's."""
        return self.project(x.transpose(1, 2).flatten(2))

    @staticmethod
    def _zeroed(x: Float[Tensor, "B C F M"], lengths: Int[Tensor, "B"]) -> Float[Tensor, "B C F M"]:
        valid = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
        return torch.where(valid[:, None, :, None], x, 0)


class SubsampleStream:
    """`Subsample` of features that come in parts. Output t is made of frames factor·t ± (factor - 1), so it waits for
    one later frame of each convolution; `last` gives what the end of the stream leaves."""

    def __init__(self, stem: Subsample):
        self.stem = stem
        self.held: list[Tensor | None] = [None] * (len(stem.depthwise) + 1)

    def push(self, features: Float[Tensor, "B F M"], last: bool = False) -> Float[Tensor, "B T D"]:
        x = features[:, None]
        for stage, held in enumerate(self.held):
            edges = int(held is None), int(last)  # padding, as both ends of the whole have it
            x = F.pad(x if held is None else torch.cat([held, x], 2), (0, 0, *edges))
            count = max(x.shape[2] - 1, 0) // 2
            self.held[stage] = x[:, :, 2 * count :]
            x = self.stem.halve(stage, x) if count else self._none(stage, x)
        return self.stem.flat(x)

    def _none(self, stage: int, x: Tensor) -> Float[Tensor, "B C 0 M"]:
        return x.new_zeros(len(x), self.stem.first.out_channels, 0, (x.shape[3] + 1) // 2)


class MaskedGroupNorm(nn.GroupNorm):
    """Group norm over one group whose mean and variance leave padded frames out."""

    def masked(self, x: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T D"]:
        if valid is None:
            return self(x.transpose(1, 2)).transpose(1, 2)
        weight = valid[..., None].to(x.dtype)
        count = weight.sum((1, 2), keepdim=True).clamp(min=1) * x.shape[-1]
        mean = (x * weight).sum((1, 2), keepdim=True) / count
        variance = ((x - mean).square() * weight).sum((1, 2), keepdim=True) / count
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@dataclass(frozen=True)
class ConformerConfig:
    """One Conformer block. `conv_norm`: `layer` is exact in padded batches; `batch` and `group` serve
    foreign weights. `conv_causal`: the convolution sees no later frame (streaming)."""

    attention: AttentionConfig
    hidden: int
    kernel: int
    conv_norm: str = "layer"
    conv_first: bool = False
    conv_bias: bool = True
    dropout: float = 0.0
    conv_causal: bool = False


class Tail:
    """The frames of a stream that a causal convolution still sees, zeros before its begin."""

    def __init__(self) -> None:
        self.frames: Tensor | None = None

    def before(self, x: Float[Tensor, "B D T"], count: int) -> Float[Tensor, "B D S"]:
        """`x` after the last `count` frames before it, S = T + `count`; keeps those for the next call."""
        joined = F.pad(x, (count, 0)) if self.frames is None else torch.cat([self.frames, x], -1)
        self.frames = joined[..., joined.shape[-1] - count :]
        return joined


class ConformerConvolution(nn.Module):
    """norm, pointwise, GLU, depthwise, norm, SiLU, pointwise (Gulati et al. 2020, figure 2)."""

    def __init__(self, config: ConformerConfig):
        super().__init__()
        width, kernel = config.attention.width, config.kernel
        self.before = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width, bias=config.conv_bias)  # a pointwise convolution
        self.depthwise = nn.Conv1d(width, width, kernel, groups=width, bias=config.conv_bias)
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        kind = config.conv_norm
        self.norm = MaskedGroupNorm(1, width) if kind == "group" else norms[kind](width)
        self.project = nn.Linear(width, width, bias=config.conv_bias)
        # an even kernel (the paper's 32) sees one frame more of the past than of the future
        self.pad = (kernel - 1, 0) if config.conv_causal else (kernel // 2, (kernel - 1) // 2)

    def forward(
        self, x: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None = None, tail: Tail | None = None
    ) -> Float[Tensor, "B T D"]:
        """`tail`: `x` goes on a stream, which a causal convolution can."""
        x = zero_padded(F.glu(self.expand(self.before(x)), -1), valid).transpose(1, 2)
        x = F.pad(x, self.pad) if tail is None else tail.before(x, self.pad[0])
        x = self.depthwise(x).transpose(1, 2)
        return self.project(F.silu(self._normed(x, valid)))

    def _normed(self, x: Float[Tensor, "B T D"], valid: Tensor | None) -> Float[Tensor, "B T D"]:
        if isinstance(self.norm, MaskedGroupNorm):
            return self.norm.masked(x, valid)
        if isinstance(self.norm, nn.BatchNorm1d):
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x)


class ConformerBlock(nn.Module):
    """½ feed-forward, attention, convolution, ½ feed-forward, norm (the macaron of Gulati et al. 2020)."""

    def __init__(self, config: ConformerConfig, drop_path: float = 0.0):
        super().__init__()
        width = config.attention.width
        self.conv_first = config.conv_first
        self.feed_before_norm, self.feed_after_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_before = FeedForward(width, config.hidden, "silu", dropout=config.dropout)
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(config.attention)
        self.convolution = ConformerConvolution(config)
        self.feed_after = FeedForward(width, config.hidden, "silu", dropout=config.dropout)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Sequential(nn.Dropout(config.dropout), DropPath(drop_path))

    def forward(
        self, x: Float[Tensor, "B T D"], mask: Tensor | None = None, valid: Bool[Tensor, "B T"] | None = None,
        rotate: object | None = None, past: tuple[LayerCache, Tail] | None = None,
    ) -> Float[Tensor, "B T D"]:  # fmt: skip
        """`past`: `x` goes on a stream of which this was seen."""
        cache, tail = past or (None, None)
        x = x + 0.5 * self.drop(self.feed_before(self.feed_before_norm(x)))
        if self.conv_first:
            x = x + self.drop(self.convolution(x, valid, tail))
        x = x + self.drop(self.attention(self.attention_norm(x), mask=mask, rotate=rotate, cache=cache))
        if not self.conv_first:
            x = x + self.drop(self.convolution(x, valid, tail))
        x = x + 0.5 * self.drop(self.feed_after(self.feed_after_norm(x)))
        return self.norm(x)
