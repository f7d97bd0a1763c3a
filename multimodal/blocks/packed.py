"""Linear maps whose weights are laid out for the CPU: one token's read them at the memory's speed, and many rows' take
half the time of PyTorch's own where that is MKL on a processor that it was not made for."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

WIDE = 1024  # inputs above which oneDNN adds up one row in another order than rows of a batch
ROWS = 512  # that oneDNN lays the weights out for: the layout that one row, and few rows, read the fastest
_product = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """x Wᵀ + b through oneDNN with weights packed in blocks, of a float map's `weight` [N K] and `bias` [N].

    PyTorch's own linear reads the weights of one row's product at a third of the memory's speed: Whisper's logits
    take 2 to 3 times as long that way. The packed copy lies beside the weights, is made for inference and has no
    gradient, and like its bias is none of the module's tensors."""

    def __init__(self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.tensors = packed, None if bias is None else bias.detach()

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        """A row has the same bits alone and in a batch (one thread)."""
        if self.in_features > WIDE and x.numel() == self.in_features:  # one row goes as two
            twice = x.reshape(1, -1).expand(2, -1).contiguous()
            return _product(twice, *self.tensors, "none", [], "")[0].view(*x.shape[:-1], -1)
        return _product(x, *self.tensors, "none", [], "")

    def gelu(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        """GELU of the map, in one call. `x` must not be wide where one row's bits matter: `up` maps are not."""
        return _product(x, *self.tensors, "gelu", [], "none")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.tensors[1] is not None}"


class PackedGelu(PackedLinear):
    """GELU of the map, in one call: alone, GELU of bfloat16 takes PyTorch as long as the map."""

    forward = PackedLinear.gelu


def can_pack() -> bool:
    return torch.backends.mkldnn.is_available()
