"""Encoders: tables of positions made once, convolutions with their norms in the weights or as products of rows, and
maps of subsampling."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.conformer import ConformerBlock, ConformerConvolution
from multimodal.blocks.positions import RelativeTerm
from multimodal.blocks.subsample import Subsample
from multimodal.inference.fused_decoder import FusedAttention, can_join
from multimodal.inference.modules import Replacement
from multimodal.inference.native.linear import NativeLinear
from multimodal.inference.packed import PackedLinear, can_pack
from multimodal.models.speech.wave_encoder import PositionConvolution, WaveConvolution
from multimodal.models.vision.fastvit import Branches
from multimodal.models.vision.tower import ConvNorm
from multimodal.models.vit import ViT

GRIDS = 256  # resampled position tables kept
CHUNK = 256  # distances that are projected together, so that they have the same bits for inputs of all lengths
FURTHEST = 2048  # distance kept, 80 s of most speech encoders


class PreparedViT(Replacement, ViT):
    def __init__(self, vit: ViT):
        super().__init__(vit)
        self.resampled: dict[tuple[int, int], Tensor] = {}

    def grid_positions(self, grid: tuple[int, int]) -> Float[Tensor, "N D"]:
        if grid == self.config.grid or self.positions is None or torch.compiler.is_compiling():
            return super().grid_positions(grid)
        if grid not in self.resampled:
            if len(self.resampled) >= GRIDS:
                self.resampled.clear()
            with torch.inference_mode(False), torch.no_grad():  # usable outside of inference mode
                self.resampled[grid] = super().grid_positions(grid)
        return self.resampled[grid]


class KeptRelativeTerm(Replacement, RelativeTerm):
    """Projects a distance once, for inputs of up to `FURTHEST` positions."""

    def __init__(self, term: RelativeTerm):
        super().__init__(term)
        self.kept: Tensor | None = None  # [H R E] of distances from R/2 - 1 down to -R/2

    def table(self, furthest: int, count: int) -> Float[Tensor, "H R E"]:
        reach, kept = max(furthest + 1, count - furthest - 1), self.kept
        if reach > FURTHEST:
            return super().table(furthest, count)
        if kept is None or reach > kept.shape[1] // 2:
            half, project = -(-reach // CHUNK) * CHUNK, super().table
            with torch.inference_mode(False), torch.no_grad():  # usable outside of inference mode
                self.kept = kept = torch.cat([project(at, CHUNK) for at in range(half - 1, -half, -CHUNK)], 1)
        first = kept.shape[1] // 2 - 1 - furthest
        return kept[:, first : first + count]


class PackedSubsample(Replacement, Subsample):
    """Subsampling with packed maps, in the order frames, bands, channels."""

    def __init__(self, stem: Subsample):
        super().__init__(stem)
        weight = self.first.weight.detach().to(memory_format=torch.channels_last, copy=True)
        self.first.weight = nn.Parameter(weight, requires_grad=False)
        self.maps = nn.ModuleList(PackedLinear(one.weight.flatten(1), one.bias, ("relu", "")) for one in self.pointwise)
        weight = self.project.weight.unflatten(1, (self.first.out_channels, -1)).transpose(1, 2).flatten(1)
        self.project = PackedLinear(weight, self.project.bias)
        self.pointwise = nn.ModuleList()

    def halve(self, stage: int, x: Float[Tensor, "B C F M"], padding: int = 0) -> Float[Tensor, "B D T K"]:
        conv = self.depthwise[stage - 1] if stage else self.first
        x = x.contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x, conv.weight, conv.bias, 2, (padding, 1), groups=conv.groups)
        return self.maps[stage - 1](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if stage else x.relu_()

    def flat(self, x: Float[Tensor, "B C T M"]) -> Float[Tensor, "B T D"]:
        return self.project(x.permute(0, 2, 3, 1).flatten(2))


Linear = Callable[..., nn.Module]  # (weight, bias, gelu) -> map


class RowConvolution(Replacement, WaveConvolution):
    """A convolution over samples as a product with overlapping rows, and GELU in the same call."""

    def __init__(self, part: WaveConvolution, linear: Linear):
        super().__init__(part)
        weight = self.conv.weight.transpose(1, 2).flatten(1)  # places of the kernel, channels of each
        self.linear, (self.kernel,), (self.stride,) = linear, self.conv.kernel_size, self.conv.stride
        if isinstance(self.norm, nn.GroupNorm):
            self.weight = weight.double()
        else:
            self.map = linear(weight, self.conv.bias, gelu=self.norm is None)
        self.conv = None

    def forward(
        self, x: Float[Tensor, "B C T"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B D S"], Int[Tensor, "B"]]:
        x = x.transpose(1, 2).contiguous()  # no copy of what another one gave
        lengths = (lengths - self.kernel) // self.stride + 1
        batch, frames, width = x.shape
        size = batch, (frames - self.kernel) // self.stride + 1, self.kernel * width
        rows = x.as_strided(size, (frames * width, self.stride * width, 1))
        if isinstance(self.norm, nn.GroupNorm):
            every = [self._over_time(row, count)(row) for row, count in zip(rows, lengths.tolist(), strict=True)]
            x = torch.stack(every) if len(every) > 1 else every[0][None]  # 64 MB of 10 s
        else:
            x = self.map(rows)
            x = x if self.norm is None else F.gelu(self.norm(x))
        return x.transpose(1, 2), lengths

    def _over_time(self, rows: Float[Tensor, "S K"], count: int) -> nn.Module:
        """The map with the norm over the first `count` frames inside: their mean and variance follow from those of the
        rows. What comes after them is not zero, but has no influence."""
        rows = rows[:count].double()
        mean = rows.mean(0)
        away = rows - mean
        spread = away.T @ away / count
        variance = ((self.weight @ spread) * self.weight).sum(1)
        gain = self.norm.weight * torch.rsqrt(variance + self.norm.eps)
        weight, dtype = gain[:, None] * self.weight, self.norm.weight.dtype
        return self.linear(weight.to(dtype), (self.norm.bias - weight @ mean).to(dtype), gelu=True)


class KeptPositions(Replacement, PositionConvolution):
    """Its weight is computed once. `native`: a product with overlapping rows for each group, and GELU in it."""

    def __init__(self, part: PositionConvolution, native: bool):
        super().__init__(part)
        kept = super().weight()
        self.kept = None if native else nn.Parameter(kept, requires_grad=False)
        sides = zip(kept.transpose(1, 2).flatten(1).chunk(self.groups), self.bias.chunk(self.groups), strict=True)
        self.maps = nn.ModuleList(_native(weight, bias, gelu=True) for weight, bias in sides if native)
        self.direction = self.length = None

    def weight(self) -> Float[Tensor, "D G K"]:
        return self.kept

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        if not self.maps:
            return super().forward(x)
        half = self.kernel // 2
        x = F.pad(x, (0, 0, half, half)).unflatten(2, (self.groups, -1)).transpose(1, 2).contiguous()
        batch, groups, frames, width = x.shape
        each = frames * width
        size = groups, batch, frames - 2 * half, self.kernel * width
        rows = x.as_strided(size, (each, groups * each, width, 1))
        return torch.cat([one(own) for one, own in zip(self.maps, rows, strict=True)], 2)


@torch.no_grad()
def prepare_speech(made: nn.Module, native: bool) -> None:
    """Replace the parts of speech encoders on a CPU, before their maps are packed. `native`: maps of floats by the
    compiled library."""
    linear = _native if native else _packed
    for name, part in list(made.named_modules()):
        if isinstance(part, ConformerBlock) and can_join(part.attention, torch.float32):
            part.attention = FusedAttention(part.attention)
        if isinstance(part, ConformerConvolution) and isinstance(part.norm, nn.BatchNorm1d):
            _fold_batch_norm(part)
        if type(part) is RelativeTerm:
            made.set_submodule(name, KeptRelativeTerm(part))
        if type(part) is Subsample and can_pack(part.first.weight.dtype):
            made.set_submodule(name, PackedSubsample(part))
        if type(part) is WaveConvolution and can_pack(part.conv.weight.dtype):
            made.set_submodule(name, RowConvolution(part, linear))
        if type(part) is PositionConvolution:
            made.set_submodule(name, KeptPositions(part, native))


def _native(weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None, gelu: bool) -> nn.Module:
    return NativeLinear(weight, bias, activation=F.gelu if gelu else None)


def _packed(weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None, gelu: bool) -> nn.Module:
    return PackedLinear(weight, bias, ("gelu", "none") if gelu else ("none", ""))


def _fold_batch_norm(part: ConformerConvolution) -> None:
    """Its statistics go into the depthwise convolution."""
    conv, (gain, shift) = part.depthwise, _scale(part.norm)
    conv.weight = nn.Parameter(conv.weight * gain[:, None, None], requires_grad=False)
    conv.bias = nn.Parameter(shift if conv.bias is None else conv.bias * gain + shift, requires_grad=False)
    part.norm = nn.Identity()


@torch.no_grad()
def fold_norms(made: nn.Module, original: nn.Module) -> None:
    """Replace each convolution with a batch norm, and each sum of such branches, in `made`, a copy of `original` in any
    types, by one convolution."""
    for name, part in list(original.named_modules()):
        inside = isinstance(original.get_submodule(name.rpartition(".")[0]), Branches)
        if isinstance(part, ConvNorm | Branches) and not inside and (folded := _folded(part)) is not None:
            own = next(made.get_submodule(name).parameters())
            made.set_submodule(name, folded.to(own.device, own.dtype))


def _folded(part: ConvNorm | Branches) -> nn.Conv2d | None:
    """One convolution that computes the same; None for a norm without a convolution beside it."""
    if isinstance(part, ConvNorm):
        conv, (gain, shift) = part.conv, _scale(part.norm)
        made = nn.utils.skip_init(
            nn.Conv2d, conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
            groups=conv.groups, device=gain.device,
        )  # fmt: skip
        made.weight.copy_(conv.weight * gain[:, None, None, None])
        made.bias.copy_(shift)
        return made
    if part.conv is None:
        return None
    made = _folded(part.conv)
    if part.scale is not None:
        point = _folded(part.scale)
        _centre(made.weight).add_(point.weight[..., 0, 0])
        made.bias.add_(point.bias)
    if part.identity is not None:
        gain, shift = _scale(part.identity)
        channels = torch.arange(made.out_channels, device=gain.device)
        _centre(made.weight)[channels, channels % made.weight.shape[1]] += gain
        made.bias.add_(shift)
    return made


def _scale(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[Float[Tensor, "C"], Float[Tensor, "C"]]:
    """Factor and term of a batch norm's statistics."""
    gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return gain, norm.bias - norm.running_mean * gain


def _centre(weight: Float[Tensor, "D C k k"]) -> Float[Tensor, "D C"]:
    side = weight.shape[-1] // 2
    return weight[..., side, side]
