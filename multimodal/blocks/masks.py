"""Attention masks: bool, True may attend; they combine with `&`, and with a float bias by `merge`.

A mask is a function of positions, `mask_mod(query, key)`; `dense` writes it out as a tensor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor], Tensor]
LEAST_BLOCK = 256  # queries of a block of attention


def places(mask: Bool[Tensor, "B T"], count: int) -> Int[Tensor, "N"]:
    """Flat positions of the `count` True values, in order. The host does not wait for a GPU."""
    flat = mask.flatten()
    return (
        flat.nonzero()[:, 0] if flat.device.type == "cpu" else flat.sort(descending=True, stable=True).indices[:count]
    )


def before(query: Tensor, key: Tensor) -> Tensor:
    """Itself and earlier positions: causal."""
    return key <= query


def near(left: int, right: int = 0) -> MaskMod:
    """`left` positions before and `right` after (Longformer, Beltagy et al. 2020; Mistral)."""
    return lambda query, key: (query - key <= left) & (key - query <= right)


def strided(step: int, count: int) -> MaskMod:
    """Itself and each `step`-th before it, `count` of them: a dilated window (Longformer, section 3.1)."""
    return lambda query, key: ((query - key) % step == 0) & (query - key >= 0) & (query - key <= step * count)


def first(count: int) -> MaskMod:
    """The first `count` positions, by all: global tokens, or a prefix."""
    return lambda query, key: (key < count).expand(torch.broadcast_shapes(query.shape, key.shape))


def random_blocks(size: int, block: int, count: int, generator: torch.Generator) -> MaskMod:
    """Each block of queries sees itself and `count` random blocks of `size` positions (BigBird, Zaheer et al. 2020).
    `generator`: on the CPU, so that each device draws the same."""
    number = -(-size // block)
    table = torch.rand(number, number, generator=generator).argsort(1) < count
    table |= torch.eye(number, dtype=torch.bool)
    return lambda query, key: table[query // block, key // block]


def any_of(*mods: MaskMod) -> MaskMod:
    return lambda query, key: reduce(or_, (mod(query, key) for mod in mods))


def all_of(*mods: MaskMod) -> MaskMod:
    return lambda query, key: reduce(and_, (mod(query, key) for mod in mods))


def dense(mask_mod: MaskMod, queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """The last query is aligned with the last key (KV cache)."""
    rows = torch.arange(keys - queries, keys, device=device)
    return mask_mod(rows[:, None], torch.arange(keys, device=device)[None, :])


def causal(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Each query sees itself and what came before."""
    return dense(before, queries, keys, device)


def window(
    queries: int, keys: int, left: int, right: int = 0, device: torch.device | None = None
) -> Bool[Tensor, "T S"]:
    """Each query sees `left` positions before it and `right` after."""
    return dense(near(left, right), queries, keys, device)


def prefix(queries: int, keys: int, length: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Causal, but all queries see the first `length` keys (prefix LM, T5 paper figure 4)."""
    return dense(any_of(before, first(length)), queries, keys, device)


def blocks(queries: int, keys: int, block: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Each query sees its own block and all earlier ones (chunked streaming attention)."""
    return dense(lambda query, key: key // block <= query // block, queries, keys, device)


def padding(lengths: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B S"]:
    """True for the first `lengths[b]` of `size` positions."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def key_mask(valid: Bool[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """A padding mask that broadcasts over heads and queries."""
    return valid[:, None, None, :]


def documents(ids: Int[Tensor, "B S"]) -> Bool[Tensor, "B 1 S S"]:
    """Each position sees its own document in a packed row."""
    return (ids[:, :, None] == ids[:, None, :])[:, None]


@dataclass(frozen=True)
class Causal:
    """Causal attention of whole texts without a mask tensor, for which GPUs have their fastest kernels. PyTorch's
    `is_causal` is aligned top-left, so it is wrong for a cached chunk. It combines with no other mask and no bias."""

    def attend(
        self, kernel: Callable[..., Tensor], query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K T E"],
        value: Float[Tensor, "B K T E"], scale: float,
    ) -> Float[Tensor, "B H T E"]:  # fmt: skip
        """`kernel` is called as `F.scaled_dot_product_attention`."""
        return kernel(query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


@dataclass(frozen=True)
class Local:
    """Each position sees `left` before it and `right` after that are `valid`, as a mask whose matrix is never whole:
    queries go in blocks, each with the keys that it sees. It combines with no other mask, and takes no cache."""

    left: int
    right: int
    valid: Bool[Tensor, "B T"]

    def blocks(self) -> Iterator[tuple[slice, slice, Bool[Tensor, "B 1 Q K"]]]:
        """Queries, their keys and the mask between them."""
        total, size = self.valid.shape[1], max(LEAST_BLOCK, self.left + self.right)
        for start in range(0, total, size):
            stop = min(start + size, total)
            first, last = max(0, start - self.left), min(total, stop + self.right)
            rows = torch.arange(start, stop, device=self.valid.device)[:, None]
            seen = near(self.left, self.right)(rows, torch.arange(first, last, device=self.valid.device))
            yield slice(start, stop), slice(first, last), seen & key_mask(self.valid[:, first:last])

    def dense(self) -> Bool[Tensor, "B 1 T T"]:
        total = self.valid.shape[1]
        return window(total, total, self.left, self.right, self.valid.device) & key_mask(self.valid)


def query_blocks(
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None, count: int
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """As `Local.blocks` of `count` positions that see all keys which `mask` lets them see."""
    for start in range(0, count, LEAST_BLOCK):
        rows = slice(start, min(start + LEAST_BLOCK, count))
        yield rows, slice(0, count), mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]


def merge(
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | Causal | None, bias: Float[Tensor, "..."] | None
) -> Bool[Tensor, "..."] | Float[Tensor, "..."] | Causal | None:
    """Combine a bool or float mask and a float bias into one mask for scaled_dot_product_attention."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias
