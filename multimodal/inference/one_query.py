"""Attention from one position: the last block of a tower pooled by its class token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.blocks.attention import Attention
from multimodal.blocks.stack import Block, select_positions
from multimodal.inference.modules import Frozen, Replacement


class OneQuery(Frozen):
    """Attention of a single unmasked query, without projecting keys and values.

    q·(K x) = (Kᵀq)·x, and the mean of projected values is the projection of their mean. The keys' bias adds the same
    to all scores, so softmax removes it. This saves two maps of all positions; sums are taken in another order.

    `prepared` is a copy of the attention `original` in any number format; it provides the query and output maps."""

    def __init__(self, prepared: Attention, original: Attention, dtype: torch.dtype):
        super().__init__()
        self.query, self.out, self.scale = prepared.query, prepared.out, prepared.scale
        key, value = (part.weight.detach().to(dtype, copy=True) for part in (original.key, original.value))
        bias = None if original.value.bias is None else original.value.bias.detach().to(dtype, copy=True)
        self.tensors = *(part.unflatten(0, (prepared.heads, -1)) for part in (key, value)), bias  # [H E D] twice

    def forward(self, x: Float[Tensor, "B 1 D"], source: Float[Tensor, "B S D"]) -> Float[Tensor, "B 1 D"]:
        key, value, bias = self.tensors
        query = self.query(x).view(len(x), *key.shape[:2]).transpose(0, 1)
        query = torch.bmm(query, key).transpose(0, 1)  # [B H D]
        scores = torch.baddbmm(x.new_empty(()), query, source.mT, beta=0, alpha=self.scale)
        mean = torch.bmm(scores.softmax(-1), source).transpose(0, 1)  # [H B D]
        mixed = torch.bmm(mean, value.mT).transpose(0, 1).reshape(len(x), 1, -1)
        return self.out(mixed if bias is None else mixed + bias)


class OneQueryBlock(Replacement, Block):
    """A block that computes single unmasked positions by `OneQuery`."""

    def __init__(self, block: Block, original: Block):
        super().__init__(block)
        dtypes = (tensor.dtype for tensor in block.parameters())  # none where all parts are compiled
        self.one_query = OneQuery(block.attention, original.attention, next(dtypes, torch.float32))

    def forward_one(self, x: Float[Tensor, "B T D"], mask: Tensor | None, only: Int[Tensor, "B"]) -> Tensor:
        """[B 1 D]"""
        if mask is not None:
            return super().forward_one(x, mask, only)
        branch = self.attention_branch
        keys = branch.normed(x)
        x = branch(select_positions(x, only), lambda h: self.one_query(h, keys))
        return self.feed_branch(x, self.feed)


def has_one_query(block: Block) -> bool:
    """Return True if `OneQueryBlock` applies: a key for each query head, nothing added to scores, and no norms."""
    own = block.attention
    others = (own.relative, own.gate, own.query_norm, own.inner_norm)
    return type(own) is Attention and own.heads == own.kv_heads and all(other is None for other in others)
