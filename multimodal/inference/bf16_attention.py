"""Self-attention in bfloat16 on a CPU."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.blocks.attention import Attention
from multimodal.blocks.capture import capturing
from multimodal.inference.modules import Replacement

QUERIES = 500  # per product: their weights over 1500 keys stay in the processor's cache
WEIGHTS = QUERIES * 1500  # per product, of several heads where there are few keys


class BlockedAttention(Replacement, Attention):
    """Self-attention without a mask, or with one [T S] mask, in blocks of heads and queries.

    On a CPU PyTorch's attention multiplies bfloat16 at float32's speed; these products take less than half the time.
    Other masks, sources, caches and attention capture use PyTorch's attention."""

    def forward(self, x: Float[Tensor, "B T D"], *source: Any, mask: Tensor | None = None, **other: Any) -> Tensor:
        """[B T D]"""
        plain = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype == torch.bool)
        if capturing() or not plain or any(value is not None for value in (*source, *other.values())):
            return super().forward(x, *source, mask=mask, **other)
        # contiguous: for a single image each product would copy them again
        query, key, value = (
            self.split(part(x)).flatten(0, 1).contiguous() for part in (self.query, self.key, self.value)
        )
        added = None if mask is None else x.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        mixed, count = torch.empty_like(query), x.shape[1]
        heads = max(1, WEIGHTS // (min(count, QUERIES) * count))
        for first in range(0, len(query), heads):
            for start in range(0, count, QUERIES):
                own, rows = slice(first, first + heads), slice(start, start + QUERIES)
                bias, beta = (x.new_empty(()), 0) if added is None else (added[rows], 1)
                scores = torch.baddbmm(bias, query[own, rows], key[own].mT, beta=beta, alpha=self.scale)
                mixed[own, rows] = torch.bmm(scores.softmax(-1), value[own])
        return self.out(mixed.view(len(x), self.heads, count, -1).transpose(1, 2).flatten(2))
