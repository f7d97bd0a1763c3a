"""Key/value caches. The caller owns them; attention only appends and reads."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.positions import relative_distances


class LayerCache:
    """Keys and values of one attention, in a buffer of at least `room` positions that doubles when full, so that
    appending is amortised O(1)."""

    def __init__(self, room: int = 0) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self.length, self.room = 0, room
        self.at: Int[Tensor, "1"] | None = None  # the position of the next query, where it is not the last key's

    @property
    def known(self) -> bool:
        return self._key is not None

    @property
    def key(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._key is None else self._key[:, :, : self.length]

    @property
    def value(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._value is None else self._value[:, :, : self.length]

    def append(
        self, key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"]
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]:
        """Adds T positions; returns all that are held."""
        end = self.length + key.shape[2]
        if not self.length and end >= self.room:  # empty, or cut to nothing
            self._key, self._value = key.contiguous(), value.contiguous()
        else:
            if self._key is None or end > self._key.shape[2]:
                self._key, self._value = self._grown(self._key, key, end), self._grown(self._value, value, end)
            self._key[:, :, self.length : end] = key
            self._value[:, :, self.length : end] = value
        self.length = end
        return self.key, self.value

    def _grown(self, held: Tensor | None, new: Tensor, need: int) -> Tensor:
        batch, heads, _, width = new.shape
        room = new.new_empty(batch, heads, max(2 * self.length, need, self.room, 32), width)
        if held is not None:
            room[:, :, : self.length] = held[:, :, : self.length]
        return room

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        """Keeps these rows of the batch, in this order (beam search)."""
        if self._key is not None:
            self._key, self._value = self._key.index_select(0, rows), self._value.index_select(0, rows)

    def cut(self, length: int) -> None:
        """Forgets the positions from `length` on."""
        self.length = min(self.length, length)


class Cache:
    """The caches of a stack: one for self-attention and one for cross-attention per layer.

    `start`: how many positions at the begin of each row are padding. `room`: positions to make room for at once.
    Several rows in a row may share one source; then the cross-attention has that many fewer rows."""

    def __init__(self, layers: int, start: Int[Tensor, "B"] | None = None, room: int = 0) -> None:
        self.self_attention = [LayerCache(room) for _ in range(layers)]
        self.cross_attention = [LayerCache() for _ in range(layers)]
        self.source_mask: Bool[Tensor, "P 1 1 S"] | None = None
        self.context: int | None = None  # positions that the model has
        self.start = start if start is not None and start.any() else None

    @property
    def length(self) -> int:
        """Positions already seen by self-attention."""
        return self.self_attention[0].length

    @property
    def held(self) -> int:
        """Positions whose keys are held."""
        return self.length

    def distances(self, count: int, device: torch.device) -> Int[Tensor, "T S"]:
        """Key minus query position, of the next `count` ids and of all keys that are held once these have come."""
        return relative_distances(count, self.held + count, device)

    @property
    def has_source(self) -> bool:
        return bool(self.cross_attention) and self.cross_attention[0].known

    def text_positions(self, count: int) -> Int[Tensor, "B T"] | None:
        """Of the next `count` ids of each row, without its padding; None: they go on from `length` in all rows."""
        if self.start is None:
            return None
        return torch.arange(self.length, self.length + count, device=self.start.device) - self.start[:, None]

    def real(self, count: int) -> Bool[Tensor, "B S"] | None:
        """Which of the keys are ids of the text, once `count` more have come; None: all."""
        if self.start is None:
            return None
        return torch.arange(self.length + count, device=self.start.device) >= self.start[:, None]

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        """Keeps these rows, each with its source."""
        self.reorder_rows(rows)
        self.reorder_sources(rows)

    def reorder_rows(self, rows: Int[Tensor, "B"]) -> None:
        """Keeps these rows; the sources stay as they are."""
        for layer in self.self_attention:
            layer.reorder(rows)
        if self.start is not None:
            self.start = self.start[rows]

    def reorder_sources(self, sources: Int[Tensor, "P"]) -> None:
        """Keeps these sources; the rows stay as they are."""
        for layer in self.cross_attention:
            layer.reorder(sources)
        if self.source_mask is not None:
            self.source_mask = self.source_mask[sources]

    def cut(self, length: int) -> None:
        """Forgets the target positions from `length` on; the source stays."""
        for layer in self.self_attention:
            layer.cut(length)

    def join(self, parts: Sequence["Cache"], size: int, order: Int[Tensor, "B"]) -> None:
        """Takes up the rows of other caches, with their sources, padded on the left to `size` positions, in an
        `order` of all of them."""
        for name in ("self_attention", "cross_attention"):
            for i, layer in enumerate(getattr(self, name)):
                own = [getattr(part, name)[i] for part in parts]
                pads = [size - one.length if name == "self_attention" else 0 for one in own]
                layer.append(*(
                    torch.cat([F.pad(x, (0, 0, pad, 0)) for x, pad in zip(xs, pads, strict=True)])[order]
                    for xs in ([one.key for one in own], [one.value for one in own])
                ))  # fmt: skip


class WindowLayer(LayerCache):
    """Keys and values of the last `window` - 1 positions, which is all that the next one sees beside itself. They move
    to the front of their buffer each time it is full, so that appending is amortised O(1) here too."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.first, self.held = window, 0, 0

    @property
    def key(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._key is None else self._key[:, :, self.first : self.first + self.held]

    @property
    def value(self) -> Float[Tensor, "B K S E"] | None:
        return None if self._value is None else self._value[:, :, self.first : self.first + self.held]

    def append(
        self, key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"]
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]:
        """Adds T positions; returns these and those that were held."""
        count, kept = key.shape[2], self.window - 1
        end = self.first + self.held + count
        if self._key is not None and end <= self._key.shape[2]:
            for held, new in ((self._key, key), (self._value, value)):
                held[:, :, end - count : end] = new
            seen = tuple(held[:, :, self.first : end] for held in (self._key, self._value))
        else:
            olds = (self.key, self.value) if self.held else (key[:, :, :0], value[:, :, :0])
            seen = tuple(torch.cat(pair, 2) for pair in zip(olds, (key, value), strict=True))
            # room for as many again and for one at a time; what a prompt had beyond the window is let go
            room = 2 * kept + 32
            self._key, self._value = (x.new_empty(*x.shape[:2], room, x.shape[3]) for x in seen)
            end = min(seen[0].shape[2], kept)
            for held, new in zip((self._key, self._value), seen, strict=True):
                held[:, :, :end] = new[:, :, new.shape[2] - end :]
        self.held = min(self.held + count, kept)
        self.first, self.length = end - self.held, self.length + count
        return seen

    def cut(self, length: int) -> None:
        """Raises ValueError where positions are wanted again that are no longer held."""
        gone = self.length - length
        if gone <= 0:
            return
        if length and self.length > self.held:
            raise ValueError(f"a window of {self.window} cannot go back from {self.length} positions to {length}")
        self.held, self.length = max(self.held - gone, 0), length


class WindowCache(Cache):
    """A cache for attention that sees the last `window` positions, its own among them; it holds no more of them."""

    def __init__(self, layers: int, window: int, start: Int[Tensor, "B"] | None = None) -> None:
        super().__init__(layers, start)
        self.self_attention = [WindowLayer(window) for _ in range(layers)]

    @property
    def held(self) -> int:
        return self.self_attention[0].held

    def real(self, count: int) -> Bool[Tensor, "B S"] | None:
        every = super().real(count)
        return None if every is None else every[:, self.length - self.held :]

    def join(self, parts: Sequence[Cache], size: int, order: Int[Tensor, "B"]) -> None:
        raise ValueError("a cache of a window takes no other caches up")
