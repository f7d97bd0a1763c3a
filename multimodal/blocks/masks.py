"""Attention masks: bool, True may attend; they combine with `&`. A float bias joins by `merge`.

What may attend is a rule of the positions, `rule(query, key)`; `dense` writes it out as a tensor, `sparse` gives it to
FlexAttention, which on a GPU skips the blocks that nothing attends to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Rule = Callable[[Tensor, Tensor], Tensor]


def before(query: Tensor, key: Tensor) -> Tensor:
    """Itself and what came before: causal."""
    return key <= query


def near(left: int, right: int = 0) -> Rule:
    """`left` positions before and `right` after (Longformer, Beltagy et al. 2020; Mistral)."""
    return lambda query, key: (query - key <= left) & (key - query <= right)


def strided(step: int, count: int) -> Rule:
    """Itself and each `step`-th before it, `count` of them: a dilated window (Longformer, section 3.1)."""
    return lambda query, key: ((query - key) % step == 0) & (query - key >= 0) & (query - key <= step * count)


def first(count: int) -> Rule:
    """The first `count` positions, by all: global tokens, or a prefix."""
    return lambda query, key: (key < count).expand(torch.broadcast_shapes(query.shape, key.shape))


def globals_(count: int) -> Rule:
    """The first `count` positions see all and are seen by all (Longformer, BigBird)."""
    return lambda query, key: (key < count) | (query < count)


def drawn(size: int, block: int, count: int, generator: torch.Generator) -> Rule:
    """For each block of queries `count` random blocks of keys, its own apart (BigBird, Zaheer et al. 2020), of `size`
    positions in all."""
    number = -(-size // block)
    table = torch.rand(number, number, generator=generator).argsort(1) < count
    table |= torch.eye(number, dtype=torch.bool)

    def rule(query: Tensor, key: Tensor) -> Tensor:
        return table.to(query.device)[query // block, key // block]

    return rule


def either(*rules: Rule) -> Rule:
    def rule(query: Tensor, key: Tensor) -> Tensor:
        seen = rules[0](query, key)
        for other in rules[1:]:
            seen = seen | other(query, key)
        return seen

    return rule


def both(*rules: Rule) -> Rule:
    def rule(query: Tensor, key: Tensor) -> Tensor:
        seen = rules[0](query, key)
        for other in rules[1:]:
            seen = seen & other(query, key)
        return seen

    return rule


def dense(rule: Rule, queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """The last query is aligned with the last key (KV cache)."""
    rows = torch.arange(keys - queries, keys, device=device)
    return rule(rows[:, None], torch.arange(keys, device=device)[None, :])


def causal(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Each query sees itself and what came before."""
    return dense(before, queries, keys, device)


def window(
    queries: int, keys: int, left: int, right: int = 0, device: torch.device | None = None
) -> Bool[Tensor, "T S"]:
    """Each query sees `left` positions before it and `right` after."""
    return dense(near(left, right), queries, keys, device)


def prefix(queries: int, keys: int, length: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Causal, except that the first `length` keys are seen by all (prefix LM, T5 paper figure 4)."""
    return dense(either(before, first(length)), queries, keys, device)


def blocks(queries: int, keys: int, block: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Each query sees its own block and all earlier ones (chunked streaming attention)."""
    return dense(lambda query, key: key // block <= query // block, queries, keys, device)


def padding(lengths: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B S"]:
    """True for the first `lengths[b]` of `size` positions."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def over_keys(valid: Bool[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """A padding mask in the shape that attention broadcasts."""
    return valid[:, None, None, :]


def documents(ids: Int[Tensor, "B S"]) -> Bool[Tensor, "B 1 S S"]:
    """Positions see only their own document in a packed row."""
    return (ids[:, :, None] == ids[:, None, :])[:, None]


@dataclass(frozen=True)
class Sparse:
    """A mask that is not written out. It stands for itself: no padding, bias or cache combines with it."""

    blocks: "BlockMask"

    def attend(
        self, query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K S E"], value: Float[Tensor, "B K S E"],
        scale: float,
    ) -> Float[Tensor, "B H T E"]:  # fmt: skip
        """FlexAttention, compiled on a GPU. Elsewhere it runs as written, in all blocks and without a gradient."""
        from torch.nn.attention.flex_attention import flex_attention

        run = torch.compile(flex_attention) if query.device.type == "cuda" else flex_attention
        return run(query, key, value, block_mask=self.blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1])

    def __and__(self, other: object) -> "Sparse":
        raise ValueError("a sparse mask combines with no other: make the padding or the cache part of its rule")

    __rand__ = __and__


@dataclass(frozen=True)
class Causal(Sparse):
    """Causal attention of as many queries as keys without a mask, for which GPUs have their fastest kernels. PyTorch's
    `is_causal` is aligned top-left, so it is wrong for anything but whole texts."""

    blocks: None = None

    def attend(
        self, query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"],
        scale: float,
    ) -> Float[Tensor, "B H T E"]:  # fmt: skip
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=gqa)


def sparse(rule: Rule, queries: int, keys: int, device: torch.device | None = None, block: int = 128) -> Sparse:
    """The rule in blocks of positions (Dong et al. 2024), the last query aligned with the last key."""
    from torch.nn.attention.flex_attention import create_block_mask

    shift = keys - queries
    made = create_block_mask(
        lambda _, __, query, key: rule(query + shift, key), None, None, queries, keys,
        device=str(device or "cpu"), BLOCK_SIZE=block,
    )  # fmt: skip
    return Sparse(made)


def merge(
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | Sparse | None, bias: Float[Tensor, "..."] | None
) -> Bool[Tensor, "..."] | Float[Tensor, "..."] | Sparse | None:
    """A bool or float mask and a float bias as one mask for scaled_dot_product_attention."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if isinstance(mask, Sparse):
        return mask & bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias
