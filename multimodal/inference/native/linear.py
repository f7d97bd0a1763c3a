"""Linear maps and norms through the compiled library."""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from multimodal.blocks.layers import gelu_tanh, quick_gelu
from multimodal.inference.modules import Frozen
from multimodal.inference.native.library import LinearRecord, NormRecord, library

LEVELS = 127  # of a weight and of an activation, to each side of 0
ZERO = 128  # of activations, which are unsigned bytes
ACTIVATIONS = {F.gelu: 1, gelu_tanh: 2, quick_gelu: 3, F.silu: 4, F.relu: 5}  # as in linear.h
SOME = 64  # panels that are laid out at a time


class NativeLinear(Frozen):
    """x Wᵀ + b, then an `activation`, with the same bits for a row alone and among others, on any number of threads.

    Built from a float map's `weight` [N K] and `bias` [N]. `int8`: symmetric integer weights (one scale per output) and
    activations (one scale per row), as `Int8Linear`."""

    def __init__(
        self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None, int8: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.activation = 0 if activation is None else ACTIVATIONS[activation]
        self.out_features, self.in_features, self.int8 = *weight.shape, int8
        weight, self.panel = weight.detach().float(), library().panel(int8)
        peaks = torch.linalg.vector_norm(weight, torch.inf, 1).clamp_min_(1e-30) if int8 else None
        panels, sums = self._panels(weight, peaks)
        others = peaks / LEVELS if int8 else None, None if bias is None else bias.detach().float(), sums
        padded = (None if one is None else F.pad(one, (0, -len(one) % self.panel)).clone() for one in others)
        self.tensors = panels, *padded
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        self.map = LinearRecord(*pointers, self.out_features, panels.shape[1] * panels.shape[3])
        self.place, self.multiply = ctypes.addressof(self.map), library().linear

    def _panels(
        self, weight: Float[Tensor, "N K"], peaks: Float[Tensor, "N"] | None
    ) -> tuple[Num[Tensor, "P S panel each"], Int[Tensor, "N"] | None]:
        """Weights [panels, inputs / each, outputs of a panel, each], with 4 bytes in each place, and for integers what
        `ZERO` adds to each output. A few panels at a time, since the logits' weights are half of a small model."""
        each, count = 1 if peaks is None else 4, -(-len(weight) // self.panel)
        dtype = torch.float32 if peaks is None else torch.int8
        made = weight.new_empty(count, -(-weight.shape[1] // each), self.panel, each, dtype=dtype)
        sums = []
        for at in range(0, count, SOME):
            rows = slice(at * self.panel, (at + SOME) * self.panel)
            part = weight[rows]
            if peaks is not None:
                part = (part * (LEVELS / peaks[rows, None])).round_()
                sums.append(part.sum(1).int() * ZERO)
            part = F.pad(part, (0, -part.shape[1] % each, 0, -len(part) % self.panel))
            made[at : at + SOME] = part.reshape(-1, self.panel, made.shape[1], each).transpose(1, 2)
        return made, None if peaks is None else torch.cat(sums)

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        rows = x.detach().reshape(-1, self.in_features).float()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()  # rows may overlap
        y = rows.new_empty(len(rows), self.out_features)
        places = rows.data_ptr(), len(rows), self.in_features, rows.stride(0), y.data_ptr()
        self.multiply(self.place, *places, self.activation, torch.get_num_threads())
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.tensors[2] is not None}, int8={self.int8}"


class NativeNorm(Frozen):
    """A LayerNorm over the last dimension, in float32."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.width = len(norm.weight)
        self.tensors = tuple(None if one is None else one.detach().float().clone() for one in (norm.weight, norm.bias))
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        self.record = NormRecord(*pointers, norm.eps, False)
        self.place, self.normalize = ctypes.addressof(self.record), library().norm

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        x = x.detach().float().contiguous()
        y = torch.empty_like(x)
        places = x.data_ptr(), x.numel() // self.width, self.width, y.data_ptr()
        self.normalize(self.place, *places, torch.get_num_threads())
        return y
