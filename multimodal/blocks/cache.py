"""Key/value caches. The caller owns them; attention appends and reads."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.positions import relative_distances

KeyValue = tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]


class LayerCache:
    """Keys and values of one attention, in a buffer of at least `capacity` positions that doubles when full, so that
    appending is amortised O(1)."""

    def __init__(self, capacity: int = 0) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self.length, self.capacity = 0, capacity

    @property
    def known(self) -> bool:
        return self._key is not None

    @property
    def key(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._key is None else self._key[:, :, : self.length]

    @property
    def value(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._value is None else self._value[:, :, : self.length]

    def distances(self) -> Int[Tensor, "1 S"] | None:
        """Key minus query position; None: the last query is at the last key."""
        return None

    def append(self, key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"]) -> KeyValue:
        """Add T positions; return all cached ones."""
        end = self.length + key.shape[2]
        if not self.length and end >= self.capacity:  # empty, or cut to nothing
            self._key, self._value = key.contiguous(), value.contiguous()
        else:
            if self._key is None or end > self._key.shape[2]:
                self._key, self._value = self._grown(self._key, key, end), self._grown(self._value, value, end)
            self._key[:, :, self.length : end] = key
            self._value[:, :, self.length : end] = value
        self.length = end
        return self.key, self.value

    def reserve(self, count: int) -> KeyValue:
        """The buffers [B K capacity E], with space for `count` more positions."""
        end = self.length + count
        if end > self._key.shape[2]:
            self._key, self._value = (self._grown(side, side, end) for side in (self._key, self._value))
        return self._key, self._value

    def _grown(self, old: Tensor | None, new: Tensor, need: int) -> Tensor:
        batch, heads, _, width = new.shape
        buffer = new.new_empty(batch, heads, max(2 * self.length, need, self.capacity, 32), width)
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        """Keep these rows of the batch, in this order (beam search)."""
        if self._key is not None:
            self._key, self._value = self._key.index_select(0, rows), self._value.index_select(0, rows)

    def cut(self, length: int) -> None:
        """Drop the positions from `length` on."""
        self.length = min(self.length, length)


class Cache:
    """The caches of a stack: one for self-attention and one for cross-attention per layer.

    `start`: number of left-padded positions of each row. `capacity`: positions to allocate at once. Several
    consecutive rows may share one source; then the cross-attention has that many fewer rows. `best`: greedy decoding's
    choice, logits [B V] -> tokens [B] and their log-probabilities [B]; None: PyTorch's."""

    def __init__(self, layers: int, start: Int[Tensor, "B"] | None = None, capacity: int = 0) -> None:
        self.self_attention = [LayerCache(capacity) for _ in range(layers)]
        self.cross_attention = [LayerCache() for _ in range(layers)]
        self.source_mask: Bool[Tensor, "P 1 1 S"] | None = None
        self.context: int | None = None  # positions that the model has
        self.group: Int[Tensor, "B"] | None = None  # of each row, in a model with grouped blocks
        self.start = start if start is not None and start.any() else None
        self.best: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        # of a static cache on a GPU: a `Start` of searches inside of a graph; (step, prompt, eos, max_new, processors,
        # sampler, copies) -> steps of greedy decoding or sampling inside of one, None where they cannot be
        self.start_search: Callable[..., Any] | None = None
        self.generate: Callable[..., Any] | None = None

    @property
    def length(self) -> int:
        """Positions that self-attention has seen."""
        return self.self_attention[0].length

    @property
    def cached(self) -> int:
        """Positions whose keys are cached."""
        return self.length

    def distances(self, count: int, device: torch.device) -> Int[Tensor, "T S"]:
        """Key minus query position: queries are the next `count` ids, keys the cached ones and theirs."""
        return relative_distances(count, self.cached + count, device)

    @property
    def has_source(self) -> bool:
        return bool(self.cross_attention) and self.cross_attention[0].known

    def text_positions(self, count: int) -> Int[Tensor, "B T"] | None:
        """Positions of the next `count` ids of each row, padding not counted; None: from `length` on in all rows."""
        if self.start is None:
            return None
        return torch.arange(self.length, self.length + count, device=self.start.device) - self.start[:, None]

    def real(self, count: int) -> Bool[Tensor, "B S"] | None:
        """Mask of the keys that are not padding, after `count` more ids; None: all."""
        if self.start is None:
            return None
        return torch.arange(self.length + count, device=self.start.device) >= self.start[:, None]

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        """Keep these rows, each with its source."""
        self.reorder_rows(rows)
        self.reorder_sources(rows)

    def reorder_rows(self, rows: Int[Tensor, "B"]) -> None:
        """Keep these rows and all sources."""
        for layer in self.self_attention:
            layer.reorder(rows)
        self.start, self.group = (None if one is None else one[rows] for one in (self.start, self.group))

    def reorder_sources(self, sources: Int[Tensor, "P"]) -> None:
        """Keep these sources and all rows."""
        for layer in self.cross_attention:
            layer.reorder(sources)
        if self.source_mask is not None:
            self.source_mask = self.source_mask[sources]

    def cut(self, length: int) -> None:
        """Drop the target positions from `length` on; the source stays."""
        for layer in self.self_attention:
            layer.cut(length)

    def join(self, parts: Sequence["Cache"], size: int, order: Int[Tensor, "B"]) -> None:
        """Append the rows of other caches with their sources, left-padded to `size` positions, in this `order`."""
        for name in ("self_attention", "cross_attention"):
            for i, layer in enumerate(getattr(self, name)):
                own = [getattr(part, name)[i] for part in parts]
                pads = [size - one.length if name == "self_attention" else 0 for one in own]
                layer.append(*(
                    torch.cat([F.pad(x, (0, 0, pad, 0)) for x, pad in zip(xs, pads, strict=True)])[order]
                    for xs in ([one.key for one in own], [one.value for one in own])
                ))  # fmt: skip


class WindowLayer(LayerCache):
    """Keys and values of the last `window` - 1 positions: all that the next one sees beside itself. They move to the
    front of their buffer when it is full, so that appending is amortised O(1)."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.first, self.cached = window, 0, 0

    @property
    def key(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._key is None else self._key[:, :, self.first : self.first + self.cached]

    @property
    def value(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._value is None else self._value[:, :, self.first : self.first + self.cached]

    def append(self, key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"]) -> KeyValue:
        """Add T positions; return these after the cached ones."""
        count, kept = key.shape[2], self.window - 1
        end = self.first + self.cached + count
        if self._key is not None and end <= self._key.shape[2]:
            for buffer, new in ((self._key, key), (self._value, value)):
                buffer[:, :, end - count : end] = new
            seen = tuple(buffer[:, :, self.first : end] for buffer in (self._key, self._value))
        else:
            olds = (self.key, self.value) if self.cached else (key[:, :, :0], value[:, :, :0])
            seen = tuple(torch.cat(pair, 2) for pair in zip(olds, (key, value), strict=True))
            # space for as many again, one at a time; positions of a prompt beyond the window are dropped
            self._key, self._value = (x.new_empty(*x.shape[:2], 2 * kept + 32, x.shape[3]) for x in seen)
            end = min(seen[0].shape[2], kept)
            for buffer, new in zip((self._key, self._value), seen, strict=True):
                buffer[:, :, :end] = new[:, :, new.shape[2] - end :]
        self.cached = min(self.cached + count, kept)
        self.first, self.length = end - self.cached, self.length + count
        return seen

    def cut(self, length: int) -> None:
        """Raises ValueError if positions before `length` are no longer cached."""
        gone = self.length - length
        if gone <= 0:
            return
        if length and self.length > self.cached:
            raise ValueError(f"a window of {self.window} cannot go back from {self.length} positions to {length}")
        self.cached, self.length = max(self.cached - gone, 0), length


class WindowCache(Cache):
    """A cache for attention to the last `window` positions, the query's among them; it keeps no more."""

    def __init__(self, layers: int, window: int, start: Int[Tensor, "B"] | None = None) -> None:
        super().__init__(layers, start)
        self.self_attention = [WindowLayer(window) for _ in range(layers)]

    @property
    def cached(self) -> int:
        return self.self_attention[0].cached

    def real(self, count: int) -> Bool[Tensor, "B S"] | None:
        every = super().real(count)
        return None if every is None else every[:, self.length - self.cached :]

    def join(self, parts: Sequence[Cache], size: int, order: Int[Tensor, "B"]) -> None:
        raise ValueError("a window cache cannot join other caches")
