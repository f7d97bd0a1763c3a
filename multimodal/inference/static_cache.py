"""Key/value caches of fixed shapes and addresses, so that a step over them can be replayed (CUDA graphs)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache, KeyValue, LayerCache


class StaticLayer(LayerCache):
    """Keys and values [R K S E] of one attention. `append` writes at position `at` [1] and returns all S positions."""

    def __init__(self, like: LayerCache, rows: int, capacity: int, at: Int[Tensor, "1"]) -> None:
        super().__init__(capacity)
        shape = (rows, like.key.shape[1], capacity, like.key.shape[3])
        self._key, self._value = (torch.zeros(shape, dtype=x.dtype, device=x.device) for x in (like.key, like.value))
        self.length, self.at = capacity, at

    def distances(self) -> Int[Tensor, "1 S"]:
        return (torch.arange(self.length, device=self.at.device) - self.at)[None]

    def append(self, key: Float[Tensor, "B K 1 E"], value: Float[Tensor, "B K 1 E"]) -> KeyValue:
        self._key.index_copy_(2, self.at, key)
        self._value.index_copy_(2, self.at, value)
        return self._key, self._value

    def fill(self, other: LayerCache) -> None:
        for own, theirs in ((self._key, other.key), (self._value, other.value)):
            own.zero_()  # the last batch may have left NaN, which leaks through a mask
            own[: theirs.shape[0], :, : theirs.shape[2]] = theirs

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        _reorder(self._key, rows)
        _reorder(self._value, rows)


class StaticCache(Cache):
    """Buffers for `rows` rows over `sources` sources and `capacity` positions, shaped like a cache that has seen its
    prompt. Fewer rows may use it: the first ones. The next position is a tensor, `at` [1]."""

    def __init__(self, like: Cache, rows: int, sources: int, capacity: int) -> None:
        super().__init__(len(like.self_attention))
        device = like.self_attention[0].key.device
        self.start, self.at = (torch.zeros(size, dtype=torch.long, device=device) for size in (rows, 1))
        self.self_attention = [StaticLayer(layer, rows, capacity, self.at) for layer in like.self_attention]
        if like.has_source:
            self.cross_attention = [StaticLayer(one, sources, one.length, self.at) for one in like.cross_attention]
        if like.source_mask is not None:
            self.source_mask = like.source_mask.new_ones(sources, *like.source_mask.shape[1:])
        layers = self.self_attention + (self.cross_attention if like.has_source else [])
        self.nbytes = sum(layer.key.nbytes + layer.value.nbytes for layer in layers)

    def fill(self, other: Cache) -> None:
        """Copy another cache's content."""
        self.at.fill_(other.length)
        self.start.zero_()
        for own, theirs in ((self.start, other.start), (self.source_mask, other.source_mask)):
            if theirs is not None:
                own[: len(theirs)] = theirs
        for own, theirs in zip(self.self_attention, other.self_attention, strict=True):
            own.fill(theirs)
        if self.has_source:
            for own, theirs in zip(self.cross_attention, other.cross_attention, strict=True):
                own.fill(theirs)

    def text_positions(self, count: int) -> Int[Tensor, "B 1"]:
        return self.at - self.start[:, None]

    def real(self, count: int) -> Bool[Tensor, "B S"]:
        positions = torch.arange(self.self_attention[0].length, device=self.at.device)
        return (positions >= self.start[:, None]) & (positions <= self.at)

    @property
    def cached(self) -> int:
        """All but the last position, which the next id takes."""
        return self.self_attention[0].length - 1

    def distances(self, count: int, device: torch.device) -> Int[Tensor, "1 S"]:
        return self.self_attention[0].distances()

    def reorder_rows(self, rows: Int[Tensor, "B"]) -> None:
        for layer in self.self_attention:
            layer.reorder(rows)
        _reorder(self.start, rows)

    def reorder_sources(self, sources: Int[Tensor, "P"]) -> None:
        for layer in self.cross_attention:
            layer.reorder(sources)
        if self.source_mask is not None:
            _reorder(self.source_mask, sources)

    def cut(self, length: int) -> None:
        self.at.clamp_(max=length)


class MovingCache(Cache):
    """A cache for a prompt that then moves into a static one (`slot`) of `capacity` positions. From there on its rows
    may be reordered and become fewer, not more. `seen`: positions so far."""

    def __init__(self, layers: int, start: Int[Tensor, "B"] | None, capacity: int) -> None:
        super().__init__(layers, start)
        self.capacity, self.seen = capacity, 0
        self.slot: StaticCache | None = None

    def move(self, slot: StaticCache) -> None:
        slot.fill(self)
        self.seen, self.slot = self.length, slot
        self.self_attention, self.cross_attention = [], []

    @property
    def length(self) -> int:
        return super().length if self.slot is None else self.seen

    def reorder_rows(self, rows: Int[Tensor, "B"]) -> None:
        super().reorder_rows(rows)
        if self.slot is not None:
            self.slot.reorder_rows(rows)

    def reorder_sources(self, sources: Int[Tensor, "P"]) -> None:
        super().reorder_sources(sources)
        if self.slot is not None:
            self.slot.reorder_sources(sources)

    def cut(self, length: int) -> None:
        super().cut(length)
        self.seen = min(self.seen, length)
        if self.slot is not None:
            self.slot.cut(length)


def _reorder(buffer: Tensor, rows: Int[Tensor, "R"]) -> None:
    """Move these rows to the front, in place."""
    buffer[: len(rows)] = buffer.index_select(0, rows)
