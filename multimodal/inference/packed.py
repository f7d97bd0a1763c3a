"""Linear maps whose weights are laid out for the CPU: one token's read them at the memory's speed, and many rows' take
half the time of PyTorch's own where that is MKL on a processor that it was not made for."""

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.layers import FeedForward, gelu_tanh, quick_gelu
from multimodal.blocks.positions import RelativeTerm
from multimodal.inference.frozen import Frozen

WIDE = 1024  # inputs above which oneDNN adds up one row in another order than rows of a batch
ROWS = 512  # that oneDNN lays the weights out for: the layout that one row, and few rows, read the fastest
SHORT = 512  # inputs up to which oneDNN adds them up one after the other, as a `_RowTable` does
ALONE = 4  # calls in a row with one row each: decoding has begun
LARGE = 4_000_000  # weights of a map whose table takes a third of a second, as long as it saves in
PATIENT = 256  # such calls
BESIDE = 384  # outputs whose sums of a `_RowTable` stay in the processor's registers
QUICK = 1.702  # quick-GELU is x·σ(QUICK·x) = swish(QUICK·x) / QUICK
_AFTER: dict[Callable[[Tensor], Tensor], tuple[str, str]] = {  # activations that oneDNN has, and their forms
    F.gelu: ("gelu", "none"), gelu_tanh: ("gelu", "tanh"), quick_gelu: ("swish", ""), F.silu: ("swish", ""),
    F.relu: ("relu", ""),
}  # fmt: skip
_product = torch.ops.mkldnn._linear_pointwise.default


class _RowTable:
    """x Wᵀ of one row, as a sum of Wᵀ's rows with x for weights (`embedding_bag`). That asks the memory for what comes
    next ahead of time, and its calls are shorter: it takes two thirds of oneDNN's time, with the same bits."""

    def __init__(self, weight: Float[Tensor, "N K"]):
        self.outputs, inputs = weight.shape
        # each thread has a part of the outputs
        self.parts = max(-(-self.outputs // BESIDE), min(torch.get_num_threads(), -(-self.outputs // 64)))
        beside = -(-self.outputs // self.parts // 16) * 16  # a register's width
        padded = F.pad(weight, (0, 0, 0, self.parts * beside - self.outputs))
        self.table = padded.view(self.parts, beside, inputs).transpose(1, 2).contiguous().view(-1, beside)
        self.rows = torch.arange(self.parts * inputs, dtype=torch.int32)
        self.firsts = torch.arange(0, self.parts * inputs, inputs, dtype=torch.int32)

    def __call__(self, x: Float[Tensor, "K"]) -> Float[Tensor, "N"]:
        weights = x if self.parts == 1 else torch.cat([x] * self.parts)  # `repeat` takes five times as long
        sums = torch.embedding_bag(self.table, self.rows, self.firsts, False, 0, False, weights)[0]
        return sums.view(-1)[: self.outputs]


class _Alone:
    """Builds the table after `ALONE` consecutive single-row calls, of a large map after `PATIENT`, and keeps it where
    it has oneDNN's bits; a large one only where it is faster, which depends on the machine."""

    __slots__ = ("calls", "large", "table", "tried", "wait")

    def __init__(self, weights: int):
        self.calls, self.table, self.tried = 0, None, False
        self.large = weights > LARGE
        self.wait = PATIENT if self.large else ALONE

    def called(self, packed: Tensor, product: Callable[[Tensor], Tensor]) -> None:
        self.calls += 1
        if self.calls < self.wait or self.tried:
            return
        with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode has no use outside of it
            weight = packed.to_dense()
            table, row = _RowTable(weight), torch.rand(1, weight.shape[1])
            fits = torch.equal(table(row[0]), product(row)[0])
            if fits and self.large:
                fits = _seconds(lambda: table(row[0])) < 0.9 * _seconds(lambda: product(row))
            self.table, self.tried = table if fits else None, True


def _seconds(call: Callable[[], object]) -> float:
    """Of the quickest of three calls."""
    times = [time.perf_counter()]
    for _ in range(3):
        call()
        times.append(time.perf_counter())
    return min(after - before for before, after in pairwise(times))


class PackedLinear(Frozen):
    """x Wᵀ + b through oneDNN with weights packed in blocks, of a float map's `weight` [N K] and `bias` [N], and an
    activation `after` it in the same call: alone, GELU of bfloat16 takes PyTorch as long as the map.

    PyTorch's own linear reads the weights of one row's product at a third of the memory's speed: Whisper's logits
    take 2 to 3 times as long that way."""

    def __init__(
        self,
        weight: Float[Tensor, "N K"],
        bias: Float[Tensor, "N"] | None = None,
        after: tuple[str, str] = ("none", ""),
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), ROWS)
        self.tensors = packed, None if bias is None else bias.detach().clone()
        self.after = after[0], [], after[1]
        short = weight.dtype == torch.float32 and self.in_features <= SHORT and after[0] == "none"
        self.alone = _Alone(weight.numel()) if short and fast_tables() else None

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        """A row has the same bits alone and in a batch (one thread)."""
        if self.in_features > WIDE and x.numel() == self.in_features:  # one row goes as two
            twice = x.reshape(1, -1).expand(2, -1).contiguous()
            return _product(twice, *self.tensors, *self.after)[0].view(*x.shape[:-1], -1)
        if self.alone is not None and not torch.is_grad_enabled():
            if x.numel() != self.in_features:
                self.alone.calls = 0
            elif self.alone.table is None:
                self.alone.called(self.tensors[0], lambda row: _product(row, self.tensors[0], None, *self.after))
            else:
                y, bias = self.alone.table(x.view(-1)), self.tensors[1]
                return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], -1)
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
    """Puts packed maps in the place of the linear ones of `made`, a copy of `like` in whatever types, where they can
    be packed."""
    sources = dict(like.named_modules())
    for name, module in list(made.named_modules()):
        if isinstance(module, FeedForward) and module.activation in _AFTER:
            _pack_feed(module, sources[name])
        for part, child in module.named_children():
            if isinstance(module, RelativeTerm):  # which asks for its map's type
                continue
            if type(child) is nn.Linear and can_pack(child.weight.dtype):
                setattr(module, part, PackedLinear(child.weight, child.bias))


def _pack_feed(feed: FeedForward, like: FeedForward) -> None:
    """What is scaled comes from the weights of `like`, so that it is rounded once."""
    if type(feed.up) is not nn.Linear or not can_pack(feed.up.weight.dtype):
        return
    factor, dtype = QUICK if feed.activation is quick_gelu else 1.0, feed.up.weight.dtype
    name, first = ("up", like.up) if like.gate is None else ("gate", like.gate)
    bias = None if first.bias is None else (first.bias * factor).to(dtype)
    setattr(feed, name, PackedLinear((first.weight * factor).to(dtype), bias, _AFTER[feed.activation]))
    feed.down = PackedLinear((like.down.weight / factor).to(dtype), feed.down.bias)
    feed.activation = nn.Identity()


@cache
def fast_tables() -> bool:
    """Whether `embedding_bag` is compiled for wide registers here."""
    return torch.cpu.get_capabilities().get("avx512_f", False)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this type here: of bfloat16 on x86 only with AVX-512 or AVX-NE-CONVERT."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and dtype == torch.float32
