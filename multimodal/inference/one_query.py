"""Attention of one position to all others, for inference: the last block of a tower of which one token is wanted."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.inference.frozen import Frozen


class OneQuery(Frozen):
    """What `own` gives for a single query without a mask, of which no keys and values are made: q·(K x) is (Kᵀq)·x, and
    the values of a mean of positions are the mean of their values. The keys' bias adds the same to all scores, and so
    nothing. Saves two maps of all positions; its sums are taken in another order.

    `like` is the attention with plain maps that `own` is a copy of, in whatever type."""

    def __init__(self, own: Attention, like: Attention, dtype: torch.dtype):
        super().__init__()
        self.query, self.out, self.scale = own.query, own.out, own.scale
        key, value = (part.weight.detach().to(dtype, copy=True) for part in (like.key, like.value))
        bias = None if like.value.bias is None else like.value.bias.detach().to(dtype, copy=True)
        self.tensors = key.unflatten(0, (own.heads, -1)), value.unflatten(0, (own.heads, -1)), bias  # [H E D] twice

    def forward(self, x: Float[Tensor, "B 1 D"], source: Float[Tensor, "B S D"]) -> Float[Tensor, "B 1 D"]:
        key, value, bias = self.tensors
        query = self.query(x).view(len(x), *key.shape[:2]).transpose(0, 1)
        asked = torch.bmm(query, key).transpose(0, 1)  # [B H D]
        scores = torch.baddbmm(x.new_empty(()), asked, source.mT, beta=0, alpha=self.scale)
        seen = torch.bmm(scores.softmax(-1), source).transpose(0, 1)  # [H B D]
        mixed = torch.bmm(seen, value.mT).transpose(0, 1).reshape(len(x), 1, -1)
        return self.out(mixed if bias is None else mixed + bias)


def has_one_query(attention: nn.Module) -> bool:
    """Whether it is one that `OneQuery` can stand for: with a key each query's head, and nothing added to scores."""
    return type(attention) is Attention and attention.heads == attention.kv_heads and attention.relative is None
