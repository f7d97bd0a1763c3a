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
_product_of_pairs = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default


class Int8Linear(Frozen):
    """x Wᵀ + b with symmetric integer weights (one scale per output channel) and activations (one scale per row).
    Built from a float map's `weight` [N K] and `bias` [N].

    The products are exact in 32 bits, so a row has the same bits in any batch. PyTorch's dynamic quantized linear
    has one activation scale for the whole batch, so there a row depends on its neighbours. Where the CPU has VNNI,
    maps above `SMALL` are packed: twice as fast with several rows. That product costs 20 µs more per call, as much as
    one row of a map up to `MIDDLE` takes: those are kept in both layouts. On other x86 processors with AVX2 FBGEMM
    multiplies, where PyTorch's product of bytes takes 2.5 to 50 times as long."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None):
        super().__init__()
        weight, levels = weight.detach().float(), weight_levels()
        peaks = weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
        # contiguous, which GPT-2's weights are not: one row's product is up to 2.3 times as fast
        rounded: Int8[Tensor, "N K"] = (weight * (levels / peaks)).round().to(torch.int8).contiguous()
        self.out_features, self.in_features = weight.shape
        self.pairs = multiplies_pairs()
        self.packed = not self.pairs and rounded.numel() > SMALL and can_pack_int8()
        zeros, packed = torch.zeros(self.out_features, dtype=torch.int64), None
        if self.pairs:
            whole = torch._make_per_channel_quantized_tensor(rounded, peaks[:, 0].double() / levels, zeros, 0)
            packed = torch.ops.quantized.linear_prepack(whole, None)
        elif self.packed:
            packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        plain = rounded.t() if packed is None or (self.packed and rounded.numel() <= MIDDLE) else None
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
        if self.pairs:
            y = _product_of_pairs(levels, 1.0, ZERO, packed)
        elif packed is None or (plain is not None and len(rows) == 1):
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
def multiplies_pairs() -> bool:
    """Return True if FBGEMM multiplies here: on x86 with AVX2 and without AVX-512 VNNI."""
    has = torch.cpu.get_capabilities()
    return (
        bool(has.get("avx2", False)) and not has.get("avx512_vnni", False)
        and "fbgemm" in torch.backends.quantized.supported_engines
    )  # fmt: skip


@cache
def weight_levels() -> int:
    """Levels of a weight to each side of 0: 127, or 63 on x86 without VNNI, which adds pairs of products in 16 bits
    and saturates."""
    if multiplies_pairs():
        return LEVELS // 2
    worst = torch.full((8, 64), LEVELS, dtype=torch.int8)
    exact = 64 * LEVELS**2
    for rows in (1, 8):
        for left, right in ((worst, worst), (-worst, worst), (worst, -worst), (-worst, -worst)):
            sign = 1 if left is right or left[0, 0] == right[0, 0] else -1
            if not (torch._int_mm(left[:rows], right.t()) == sign * exact).all():
                return LEVELS // 2
    return LEVELS
