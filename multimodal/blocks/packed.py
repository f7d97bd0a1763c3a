"""Linear maps whose weights are laid out for the CPU: one token's read them at the memory's speed, and many rows' take
half the time of PyTorch's own where that is MKL on a processor that it was not made for."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.layers import FeedForward, gelu_tanh, quick_gelu
from multimodal.blocks.positions import RelativeTerm

WIDE = 1024  # inputs above which oneDNN adds up one row in another order than rows of a batch
ROWS = 512  # that oneDNN lays the weights out for: the layout that one row, and few rows, read the fastest
QUICK = 1.702  # quick-GELU is x·σ(QUICK·x) = swish(QUICK·x) / QUICK
_AFTER: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {  # activations that oneDNN has, and their forms
    F.gelu: ("gelu", "none"), gelu_tanh: ("gelu", "tanh"), quick_gelu: ("swish", ""), F.silu: ("swish", ""),
    F.relu: ("relu", ""),
}  # fmt: skip
_product = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Module):
    """x Wᵀ + b through oneDNN with weights packed in blocks, of a float map's `weight` [N K] and `bias` [N], and an
    activation `after` it in the same call: alone, GELU of bfloat16 takes PyTorch as long as the map.

    PyTorch's own linear reads the weights of one row's product at a third of the memory's speed: Whisper's logits
    take 2 to 3 times as long that way. The packed copy lies beside the weights, is made for inference and has no
    gradient, and like its bias is none of the module's tensors."""

    def __init__(
        self,
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, "N"] | None = None,
        after: tuple[str, str] = ("none", ""),
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.tensors = packed, None if bias is None else bias.detach()
        self.after = after[0], [], after[1]

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        """A row has the same bits alone and in a batch (one thread)."""
        if self.in_features > WIDE and x.numel() == self.in_features:  # one row goes as two
            twice = x.reshape(1, -1).expand(2, -1).contiguous()
            return _product(twice, *self.tensors, *self.after)[0].view(*x.shape[:-1], -1)
        return _product(x, *self.tensors, *self.after)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.tensors[1] is not None}, after={self.after[0]}"


class PackedPatches(nn.Module):
    """A convolution of patches side by side, as a packed map."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.patch, self.map = conv.kernel_size, PackedLinear(conv.weight.flatten(1), conv.bias)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B D rows columns"]:
        """Pixels that fill no patch are dropped, as a convolution does."""
        height, width = self.patch
        rows, columns = images.shape[2] // height, images.shape[3] // width
        pixels = images[:, :, : rows * height, : columns * width]
        patches = pixels.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
        return self.map(patches.flatten(3)).permute(0, 3, 1, 2)


@torch.no_grad()
def pack(made: nn.Module, like: nn.Module) -> None:
    """Puts packed maps in the place of the linear ones of `made`, a copy of `like` in whatever types."""
    sources = dict(like.named_modules())
    for name, module in list(made.named_modules()):
        if isinstance(module, FeedForward) and module.activation in _AFTER:
            _pack_feed(module, sources[name])
        for part, child in module.named_children():
            if type(child) is nn.Linear and not isinstance(module, RelativeTerm):  # which asks for its map's type
                setattr(module, part, PackedLinear(child.weight, child.bias))


def _pack_feed(feed: FeedForward, like: FeedForward) -> None:
    """What is scaled comes from the weights of `like`, so that it is rounded once."""
    if type(feed.up) is not nn.Linear:
        return
    factor, dtype = QUICK if feed.activation is quick_gelu else 1.0, feed.up.weight.dtype
    name, first = ("up", like.up) if like.gate is None else ("gate", like.gate)
    bias = None if first.bias is None else (first.bias * factor).to(dtype)
    setattr(feed, name, PackedLinear((first.weight * factor).to(dtype), bias, _AFTER[feed.activation]))
    feed.down = PackedLinear((like.down.weight / factor).to(dtype), feed.down.bias)
    feed.activation = nn.Identity()


def can_pack() -> bool:
    return torch.backends.mkldnn.is_available()
