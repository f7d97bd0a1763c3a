"""Linear maps through the compiled library."""

import ctypes

import torch
import torch.nn.functional as F
from jaxtyping import Float, Num
from torch import Tensor

from multimodal.inference.modules import Frozen
from multimodal.inference.native.library import LinearRecord, library

LEVELS = 127  # of a weight and of an activation, to each side of 0
ZERO = 128  # of activations, which are unsigned bytes


class NativeLinear(Frozen):
    """x Wᵀ + b, with the same bits for a row alone and among others, on any number of threads.

    Built from a float map's `weight` [N K] and `bias` [N]. `int8`: symmetric integer weights (one scale per output) and
    activations (one scale per row), as `Int8Linear`."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None, int8: bool = False):
        super().__init__()
        self.out_features, self.in_features, self.int8 = *weight.shape, int8
        weight, self.panel = weight.detach().float(), library().panel()
        steps = sums = None
        if int8:
            peaks = weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
            weight = (weight * (LEVELS / peaks)).round().to(torch.int8)
            steps = self._padded(peaks[:, 0] / LEVELS)
            sums = self._padded(weight.sum(1, dtype=torch.int32) * ZERO)
        bias = None if bias is None else self._padded(bias.detach().float())
        self.tensors = self._panels(weight), steps, bias, sums
        inputs = self.tensors[0].shape[1] * self.tensors[0].shape[3]
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        self.map = LinearRecord(*pointers, self.out_features, inputs)
        self.place, self.multiply = ctypes.addressof(self.map), library().linear

    def _padded(self, values: Num[Tensor, "N"]) -> Num[Tensor, "M"]:
        return F.pad(values, (0, -len(values) % self.panel)).contiguous()

    def _panels(self, weight: Tensor) -> Tensor:
        """[panels, inputs / each, outputs of a panel, each], with 4 bytes in each place."""
        each = 4 // weight.element_size()
        weight = F.pad(weight, (0, -self.in_features % each, 0, -self.out_features % self.panel))
        weight = weight.reshape(-1, self.panel, weight.shape[1] // each, each).transpose(1, 2)
        return weight.clone(memory_format=torch.contiguous_format)  # never the original's memory

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        rows = x.detach().reshape(-1, self.in_features).float().contiguous()
        y = rows.new_empty(len(rows), self.out_features)
        places = rows.data_ptr(), len(rows), self.in_features, y.data_ptr()
        self.multiply(self.place, *places, torch.get_num_threads())
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.tensors[2] is not None}, int8={self.int8}"
