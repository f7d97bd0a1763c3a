"""Key/value caches whose shapes and addresses never change, so that a step over them can be replayed (CUDA graphs)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache, LayerCache


class StaticLayer(LayerCache):
    """Keys and values [R K S E] of one attention; `at` [1] is where `append` writes, and all S positions come back."""

    def __init__(self, like: LayerCache, rows: int, room: int, at: Int[Tensor, "1"]) -> None:
        super().__init__(room)
        shape = (rows, like.key.shape[1], room, like.key.shape[3])
        self._key, self._value = (torch.zeros(shape, dtype=x.dtype, device=x.device) for x in (like.key, like.value))
        self.length, self.at = room, at

    def append(
        self, key: Float[Tensor, "B K 1 E"], value: Float[Tensor, "B K 1 E"]
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]:
        self._key.index_copy_(2, self.at, key)
        self._value.index_copy_(2, self.at, value)
        return self._key, self._value

    def fill(self, given: LayerCache) -> None:
        for own, other in ((self._key, given.key), (self._value, given.value)):
            own.zero_()  # the last batch may have left NaN, which leaks through a mask
            own[: other.shape[0], :, : other.shape[2]] = other

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        keep(self._key, rows)
        keep(self._value, rows)


class StaticCache(Cache):
    """Buffers for `rows` rows over `sources` sources and `room` positions, like those of a cache that has seen its
    prompt. Fewer rows may fill it: the first ones. The place of the next position is a tensor, `at` [1]."""

    def __init__(self, like: Cache, rows: int, sources: int, room: int) -> None:
        super().__init__(len(like.self_attention))
        device = like.self_attention[0].key.device
        self.start, self.at = (torch.zeros(size, dtype=torch.long, device=device) for size in (rows, 1))
        self.self_attention = [StaticLayer(layer, rows, room, self.at) for layer in like.self_attention]
        if like.has_source:
            self.cross_attention = [StaticLayer(one, sources, one.length, self.at) for one in like.cross_attention]
        if like.source_mask is not None:
            self.source_mask = like.source_mask.new_ones(sources, *like.source_mask.shape[1:])
        layers = self.self_attention + (self.cross_attention if like.has_source else [])
        self.nbytes = sum(layer.key.nbytes + layer.value.nbytes for layer in layers)

    def fill(self, given: Cache) -> None:
        """Takes over all that another cache holds."""
        self.at.fill_(given.length)
        self.start.zero_()
        for own, other in ((self.start, given.start), (self.source_mask, given.source_mask)):
            if other is not None:
                own[: len(other)] = other
        for own, other in zip(self.self_attention, given.self_attention, strict=True):
            own.fill(other)
        if self.has_source:
            for own, other in zip(self.cross_attention, given.cross_attention, strict=True):
                own.fill(other)

    def text_positions(self, count: int) -> Int[Tensor, "B 1"]:
        return self.at - self.start[:, None]

    def real(self, count: int) -> Bool[Tensor, "B S"]:
        places = torch.arange(self.self_attention[0].length, device=self.at.device)
        return (places >= self.start[:, None]) & (places <= self.at)

    @property
    def held(self) -> int:
        """But the last, which the next id takes."""
        return self.self_attention[0].length - 1

    def distances(self, count: int, device: torch.device) -> Int[Tensor, "1 S"]:
        return (torch.arange(self.self_attention[0].length, device=device) - self.at)[None]

    def reorder_rows(self, rows: Int[Tensor, "B"]) -> None:
        for layer in self.self_attention:
            layer.reorder(rows)
        keep(self.start, rows)

    def reorder_sources(self, sources: Int[Tensor, "P"]) -> None:
        for layer in self.cross_attention:
            layer.reorder(sources)
        if self.source_mask is not None:
            keep(self.source_mask, sources)

    def cut(self, length: int) -> None:
        self.at.clamp_(max=length)


class MovingCache(Cache):
    """A cache for a prompt, that then moves into a static one (`slot`). From there on its rows may change places and
    become fewer, not more. `room`: positions that the static one is to have; `seen`: those it has seen."""

    def __init__(self, layers: int, start: Int[Tensor, "B"] | None, room: int) -> None:
        super().__init__(layers, start)
        self.room, self.seen = room, 0
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


def keep(held: Tensor, rows: Int[Tensor, "R"]) -> None:
    """Puts these rows first, at the address they are at."""
    held[: len(rows)] = held.index_select(0, rows)
