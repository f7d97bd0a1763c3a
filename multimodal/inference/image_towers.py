"""Image towers: positions resampled once per grid of patches, and convolutions with their norms in the weights."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.inference.modules import Replacement
from multimodal.models.vision.fastvit import Branches
from multimodal.models.vision.tower import ConvNorm
from multimodal.models.vit import ViT

GRIDS = 256  # resampled position tables kept


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


def _scale(norm: nn.BatchNorm2d) -> tuple[Float[Tensor, "C"], Float[Tensor, "C"]]:
    """Factor and term of a batch norm's statistics."""
    gain = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return gain, norm.bias - norm.running_mean * gain


def _centre(weight: Float[Tensor, "D C k k"]) -> Float[Tensor, "D C"]:
    side = weight.shape[-1] // 2
    return weight[..., side, side]
