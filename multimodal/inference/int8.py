"""Linear maps in 8-bit integers, for decoding on a CPU, which is bound by reading the weights."""

from functools import cache

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from multimodal.inference.modules import Frozen

LEVELS = 127  # of an activation, to each side of 0
ZERO = 128  # of packed maps' activations, which are unsigned bytes: oneDNN has no fast product of signed ones
SMALL, MIDDLE = 600_000, 1_200_000  # weights of a map
_product = torch.ops.onednn.qlinear_pointwise.default


class Int8Linear(Frozen):
    """x Wᵀ + b with symmetric integer weights (one scale per output channel) and activations (one scale per row).
    Built from a float map's `weight` [N K] and `bias` [N].

    The products are exact in 32 bits, so a row has the same bits in any batch. PyTorch's dynamic quantised linear
    has one activation scale for the whole batch, so there a row depends on its neighbours. Where the CPU has VNNI,
    maps above `SMALL` are packed: twice as fast with several rows. That product costs 20 µs more per call, as much as
    one row of a map up to `MIDDLE` takes: those are kept in both layouts."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None):
        super().__init__()
        weight, levels = weight.detach().float(), weight_levels()
        peaks = weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
        # contiguous, which GPT-2's weights are not: one row's product is up to 2.3 times as fast
        rounded: Int8[Tensor, "N K"] = (weight * (levels / peaks)).round().to(torch.int8).contiguous()
        self.out_features, self.in_features = weight.shape
        self.packed = rounded.numel() > SMALL and can_pack_int8()
        packed = torch.ops.onednn.qlinear_prepack(rounded, None) if self.packed else None
        plain = rounded.t() if not self.packed or rounded.numel() <= MIDDLE else None
        zeros = torch.zeros(self.out_features, dtype=torch.int64) if self.packed else None
        bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        # in a tuple: looking up a module's tensors takes as long as the small products
        self.tensors = plain, packed, peaks[:, 0] / levels, zeros, bias

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        plain, packed, weight_steps, zeros, bias = self.tensors
        rows = x.reshape(-1, x.shape[-1])
        # keeps rows with NaN or infinity so
        steps = torch.linalg.vector_norm(rows, torch.inf, 1, True).clamp_min_(1e-30).mul_(1 / LEVELS)
        levels = rows.div(steps).round_()
        # one factor at a time: a fused sum may round differently at the end of a vector
        if packed is None or (plain is not None and len(rows) == 1):
            y = torch._int_mm(levels.to(torch.int8), plain).mul(weight_steps)
        else:
            levels = levels.add_(ZERO).to(torch.uint8)
            y = _product(levels, 1.0, ZERO, packed, weight_steps, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        y.mul_(steps)
        if bias is not None:
            y.add_(bias)
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.tensors[-1] is not None}, packed={self.packed}"


def can_pack_int8() -> bool:
    """Return True if oneDNN has a fast and exact product of these types here."""
    return torch.backends.mkldnn.is_available() and torch.cpu.get_capabilities().get("avx512_vnni", False)


@cache
def weight_levels() -> int:
    """Levels of a weight to each side of 0: 127, or 63 on x86 without VNNI, which adds pairs of products in 16 bits
    and saturates."""
    worst = torch.full((8, 64), LEVELS, dtype=torch.int8)
    exact = 64 * LEVELS**2
    for rows in (1, 8):
        for left, right in ((worst, worst), (-worst, worst), (worst, -worst), (-worst, -worst)):
            sign = 1 if left is right or left[0, 0] == right[0, 0] else -1
            if not (torch._int_mm(left[:rows], right.t()) == sign * exact).all():
                return LEVELS // 2
    return LEVELS
