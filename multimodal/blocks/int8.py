"""Linear maps in 8-bit integers, for decoding on a CPU, where reading the weights is what takes the time."""

from functools import cache

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn

LEVELS = 127  # of an activation, to each side of 0


class Int8Linear(nn.Module):
    """x Wᵀ + b with integer weights, of one scale an output channel, and activations of one scale a row, both
    symmetric. Built from a float map's `weight` [N K] and `bias` [N].

    The products add up exactly in 32 bits, so a row is the same to the bit in any batch. PyTorch's dynamic quantised
    linear has one activation scale for the whole batch, so there a row depends on its neighbours."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None):
        super().__init__()
        weight, levels = weight.detach().float(), weight_levels()
        peaks = weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
        rounded: Int8[Tensor, "N K"] = (weight * (levels / peaks)).round().to(torch.int8)
        # in a tuple: to look a module's tensors up takes as long as the small products
        self.tensors = rounded.t(), peaks[:, 0] / levels, None if bias is None else bias.detach().float()

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        weight, weight_steps, bias = self.tensors
        rows = x.reshape(-1, x.shape[-1])
        steps = rows.abs().amax(1, True).clamp_min_(1e-30).mul_(1 / LEVELS)  # a row that is not finite stays so
        levels = rows.div(steps).round_().to(torch.int8)
        # each factor in a step of its own: a fused sum may round otherwise at the end of a vector than inside it
        y = torch._int_mm(levels, weight).to(torch.float32).mul_(weight_steps).mul_(steps)
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.tensors[0].shape[0]}, {self.tensors[0].shape[1]}, bias={self.tensors[2] is not None}"


@cache
def weight_levels() -> int:
    """Levels of a weight to each side of 0: 127, or 63 where the CPU adds pairs of products in 16 bits, which larger
    weights overflow (x86 without VNNI)."""
    worst = torch.full((8, 64), LEVELS, dtype=torch.int8)
    exact = 64 * LEVELS**2
    for rows in (1, 8):
        for left, right in ((worst, worst), (-worst, worst), (worst, -worst), (-worst, -worst)):
            sign = 1 if left is right or left[0, 0] == right[0, 0] else -1
            if not (torch._int_mm(left[:rows], right.t()) == sign * exact).all():
                return LEVELS // 2
    return LEVELS
