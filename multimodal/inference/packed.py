"""Linear maps with weights laid out for oneDNN on a CPU.

A single token reads them at memory speed, and many rows take half the time of PyTorch's linear where that is MKL on a
processor that MKL is not tuned for."""

from collections.abc import Callable, Container
from functools import cache, partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.experts import Router
from multimodal.blocks.layers import FeedForward, gelu_tanh, quick_gelu
from multimodal.blocks.positions import RelativeTerm
from multimodal.inference.modules import Frozen
from multimodal.inference.row_table import RowTable, TableLinear
from multimodal.inference.tune import choose, is_intel

WIDE = 1024  # inputs above which oneDNN sums a single row in another order than rows of a batch
ROWS = 512  # that oneDNN lays the weights out for: the layout that few rows read the fastest
SHORT = 512  # inputs up to which oneDNN sums them one after the other, as `RowTable` does
LARGE = 4_000_000  # weights of a map whose table costs more to build than short texts save
QUICK = 1.702  # quick-GELU is x·σ(QUICK·x) = swish(QUICK·x) / QUICK
_FUSED: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {  # oneDNN's names of activations, and their variants
    F.gelu: ("gelu", "none"), gelu_tanh: ("gelu", "tanh"), quick_gelu: ("swish", ""), F.silu: ("swish", ""),
    F.relu: ("relu", ""),
}  # fmt: skip
_product = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(Frozen):
    """x Wᵀ + b through oneDNN, followed by an `activation` in the same call (alone, GELU of bfloat16 takes PyTorch as
    long as the map).

    `weight` [N K] and `bias` [N] are a float map's. `single_rows`: also lay a small map out for single rows, in a
    `RowTable`, where this processor has fast ones with oneDNN's bits.

    On AMD PyTorch's linear reads a single row's weights at a third of memory speed: Whisper's logits take 2 to 3 times
    as long that way."""

    def __init__(
        self, weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None,
        activation: tuple[str, str] = ("none", ""), single_rows: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.tensors = packed, None if bias is None else bias.detach().clone()
        self.activation = activation[0], [], activation[1]
        small = weight.dtype == torch.float32 and self.in_features <= SHORT and weight.numel() <= LARGE
        self.table = None
        if single_rows and small and activation[0] == "none" and fast_tables():
            table, row = RowTable(weight), torch.rand(1, self.in_features, dtype=torch.float32, device="cpu")
            same = torch.equal(table(row[0]), _product(row, packed, None, *self.activation)[0])
            self.table = table if same else None

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        """A row has the same bits alone and in a batch (one thread)."""
        if x.numel() == self.in_features:
            if self.in_features > WIDE:  # as two rows, for the order of a batch
                twice = x.reshape(1, -1).expand(2, -1).contiguous()
                return _product(twice, *self.tensors, *self.activation)[0].view(*x.shape[:-1], -1)
            if self.table is not None and not torch.is_grad_enabled():
                y, bias = self.table(x.view(-1)), self.tensors[1]
                return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)
        return _product(x, *self.tensors, *self.activation)

    def extra_repr(self) -> str:
        bias = self.tensors[1] is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, activation={self.activation[0]}"


WAYS: dict[str, Callable[..., nn.Module]] = {"packed": partial(PackedLinear, single_rows=True), "table": TableLinear}


def row_way(weight: Float[Tensor, "N K"]) -> str:
    """The quickest exact way to multiply single rows by such a weight here."""
    if weight.dtype != torch.float32:
        return "packed"
    return choose(*weight.shape, WAYS, "table" if is_intel() else "packed")


def row_linear(weight: Float[Tensor, "N K"], bias: Float[Tensor, "N"] | None = None) -> nn.Module:
    """x Wᵀ + b for decoding."""
    return WAYS[row_way(weight)](weight, bias)


class PackedPatches(nn.Module):
    """A convolution over non-overlapping patches, as a packed map."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.patch, self.map = conv.kernel_size, PackedLinear(conv.weight.flatten(1), conv.bias)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B D rows columns"]:
        """Like a convolution, drops pixels that do not fill a patch."""
        height, width = self.patch
        rows, columns = images.shape[2] // height, images.shape[3] // width
        pixels = images[:, :, : rows * height, : columns * width]
        patches = pixels.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
        return self.map(patches.flatten(3)).permute(0, 3, 1, 2)


@torch.no_grad()
def pack(made: nn.Module, original: nn.Module, single_rows: Container[nn.Module] = ()) -> None:
    """Replace the linear maps of `made`, a copy of `original` in any number formats, by packed ones where possible.

    `single_rows`: modules whose maps see single rows."""
    sources = dict(original.named_modules())
    for name, module in list(made.named_modules()):
        if isinstance(module, FeedForward) and module.activation in _FUSED:
            _pack_feed(module, sources[name], module in single_rows)
        for part, child in module.named_children():
            if isinstance(module, RelativeTerm):  # it reads its map's dtype
                continue
            if type(child) not in (nn.Linear, Router):
                continue
            weight = child.weight.float() if type(child) is Router else child.weight
            if can_pack(weight.dtype):
                kind = row_linear if module in single_rows else PackedLinear
                setattr(module, part, kind(weight, child.bias))


def _pack_feed(feed: FeedForward, original: FeedForward, single_rows: bool) -> None:
    """Scaled weights come from `original`, so that they are rounded once."""
    if type(feed.up) is not nn.Linear or not can_pack(feed.up.weight.dtype):
        return
    if single_rows and row_way(feed.up.weight) == "table":  # which has no activations
        return
    factor, dtype = QUICK if feed.activation is quick_gelu else 1.0, feed.up.weight.dtype
    name, first = ("up", original.up) if original.gate is None else ("gate", original.gate)
    bias = None if first.bias is None else (first.bias * factor).to(dtype)
    setattr(feed, name, PackedLinear((first.weight * factor).to(dtype), bias, _FUSED[feed.activation]))
    kind = row_linear if single_rows else PackedLinear
    feed.down = kind((original.down.weight / factor).to(dtype), feed.down.bias)
    feed.activation = nn.Identity()


@cache
def fast_tables() -> bool:
    """Return True if `embedding_bag` is compiled for wide registers here."""
    return torch.cpu.get_capabilities().get("avx512_f", False)


def can_pack(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies this type here: bfloat16 on x86 needs AVX-512 or AVX-NE-CONVERT."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and dtype == torch.float32
