"""Caches whose keys and values are tensors that go in and come out of a graph."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from multimodal.blocks.cache import Cache, KeyValue, LayerCache


class TensorLayer(LayerCache):
    """Keys and values of one attention, which grow by concatenation."""

    def __init__(self, key: Float[Tensor, "B K S E"], value: Float[Tensor, "B K S E"]) -> None:
        super().__init__()
        self._key, self._value = key, value

    @property
    def key(self) -> Float[Tensor, "B K S E"]:
        return self._key

    @property
    def value(self) -> Float[Tensor, "B K S E"]:
        return self._value

    def append(self, key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"]) -> KeyValue:
        self._key, self._value = torch.cat([self._key, key], 2), torch.cat([self._value, value], 2)
        return self._key, self._value


class TensorCache(Cache):
    """`past`: keys and values of each layer in turn; then `crossed`, those of the source. `length` stays 0: the caller
    gives positions and mask, and a graph holds no branch on a length."""

    def __init__(
        self, past: list[Float[Tensor, "B K S E"]], crossed: list[Float[Tensor, "B K N E"]],
        source_mask: Bool[Tensor, "B 1 1 N"] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(0)
        self.self_attention = [TensorLayer(*pair) for pair in zip(past[::2], past[1::2], strict=True)]
        self.cross_attention = [TensorLayer(*pair) for pair in zip(crossed[::2], crossed[1::2], strict=True)]
        self.cross_attention = self.cross_attention or [LayerCache() for _ in self.self_attention]
        self.source_mask = source_mask

    @property
    def length(self) -> int:
        return 0

    @property
    def cached(self) -> int:
        return self.self_attention[0].key.shape[2]

    @property
    def tensors(self) -> list[Float[Tensor, "B K S E"]]:
        """Keys and values of self-attention, layer by layer."""
        return [tensor for layer in self.self_attention for tensor in (layer.key, layer.value)]
