"""The Conformer block: attention and convolution between two half feed-forwards (Gulati et al. 2020)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import LayerCache
from multimodal.blocks.layers import DropPath, FeedForward, is_customized
from multimodal.blocks.masks import Local


def zero_padding(x: Float[Tensor, "B T *D"], valid: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T *D"]:
    """Zero padded frames: a convolution over time sees its neighbours, and NaN passes through a product."""
    return x if valid is None else torch.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)


class MaskedGroupNorm(nn.GroupNorm):
    """Group norm over one group that ignores padded frames."""

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
    """One Conformer block. `conv_norm`: `layer`, exact in padded batches, or `batch` and `group` for foreign weights.
    `conv_causal`: the convolution sees no later frame (streaming)."""

    attention: AttentionConfig
    hidden: int
    kernel: int
    conv_norm: str = "layer"
    conv_first: bool = False
    conv_bias: bool = True
    dropout: float = 0.0
    conv_causal: bool = False


class ConvState:
    """The last frames of a stream, which a causal convolution still sees; zeros at its start."""

    def __init__(self) -> None:
        self.frames: Tensor | None = None

    def prepend(self, x: Float[Tensor, "B D T"], count: int) -> Float[Tensor, "B D S"]:
        """Prepend the last `count` frames (S = T + `count`) and keep those of `x` for the next call."""
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
        # an even kernel (the paper's 32) sees one more past frame than future ones
        self.pad = (kernel - 1, 0) if config.conv_causal else (kernel // 2, (kernel - 1) // 2)

    def forward(
        self, x: Float[Tensor, "B T D"], valid: Bool[Tensor, "B T"] | None = None, state: ConvState | None = None
    ) -> Float[Tensor, "B T D"]:
        """`state`: `x` continues a stream (causal convolutions only)."""
        x = zero_padding(F.glu(self.expand(self.before(x)), -1), valid)
        if state is not None:
            x = self.depthwise(state.prepend(x.transpose(1, 2), self.pad[0])).transpose(1, 2)
        elif self._goes_in_order(x):
            x = self._in_order(x)
        else:
            x = self.depthwise(F.pad(x.transpose(1, 2), self.pad)).transpose(1, 2)
        return self.project(F.silu(self._normed(x, valid)))

    def _goes_in_order(self, x: Float[Tensor, "B T D"]) -> bool:
        eager = x.is_cpu and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return eager and not is_customized(self.depthwise)

    def _in_order(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The depthwise convolution of a CPU, without a copy to another order and back: in two dimensions oneDNN takes
        channels last, and padding that is the same at both ends."""
        conv, (before, after), count = self.depthwise, self.pad, x.shape[1]
        both = before if before - after <= 1 else 0
        x = x if both else F.pad(x, (0, 0, before, after))
        x = x.transpose(1, 2)[:, :, None]
        x = F.conv2d(x, conv.weight[:, :, None], conv.bias, padding=(0, both), groups=conv.groups)
        return x[:, :, 0, :count].transpose(1, 2)

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
        bias = config.attention.bias
        self.feed_before = FeedForward(width, config.hidden, "silu", bias=bias, dropout=config.dropout)
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(config.attention)
        self.convolution = ConformerConvolution(config)
        self.feed_after = FeedForward(width, config.hidden, "silu", bias=bias, dropout=config.dropout)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Sequential(nn.Dropout(config.dropout), DropPath(drop_path))

    def forward(
        self, x: Float[Tensor, "B T D"], mask: Tensor | Local | None = None, valid: Bool[Tensor, "B T"] | None = None,
        rotate: object | None = None, past: tuple[LayerCache, ConvState] | None = None,
    ) -> Float[Tensor, "B T D"]:  # fmt: skip
        """`past`: `x` continues the stream with this state."""
        cache, state = past or (None, None)
        x = torch.add(x, self._dropped(self.feed_before(self.feed_before_norm(x))), alpha=0.5)
        if self.conv_first:
            x = x + self._dropped(self.convolution(x, valid, state))
        x = x + self._dropped(self.attention(self.attention_norm(x), mask=mask, rotate=rotate, cache=cache))
        if not self.conv_first:
            x = x + self._dropped(self.convolution(x, valid, state))
        x = torch.add(x, self._dropped(self.feed_after(self.feed_after_norm(x))), alpha=0.5)
        return self.norm(x)

    def _dropped(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.drop(x) if self.training or self.drop[0].training else x
