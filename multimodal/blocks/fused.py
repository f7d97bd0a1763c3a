"""Attention for decoding a few positions at a time on a CPU, in as few products as it takes."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.blocks.cache import LayerCache

FEW = 8  # queries; with more PyTorch's attention is faster, and holds no weights of all keys


class FusedAttention(Attention):
    """An attention with `qkv`, one map to query, key and value, where it attends to itself (`qkv` None: to a source).

    One query over many keys takes PyTorch's attention a fifth longer than the two products."""

    qkv: nn.Module | None

    def project(self, x: Tensor, source: Tensor | None, rotate: Callable | None, cache: LayerCache | None):
        if self.qkv is None:
            return super().project(x, source, rotate, cache)
        query, key, value = self.split(self.qkv(x)).split((self.heads, self.kv_heads, self.kv_heads), 1)
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        return query, *((key, value) if cache is None else cache.append(key, value))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Float[Tensor, "B H T E"]:
        if self.qkv is not None or mask is not None or query.shape[2] > FEW or self.heads != self.kv_heads:
            return super().mix(query, key, value, mask)
        scores = torch.baddbmm(
            query.new_empty(()), query.flatten(0, 1), key.flatten(0, 1).mT, beta=0, alpha=self.scale
        )
        return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view_as(query)
