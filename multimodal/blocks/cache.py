"""Key/value caches. The caller owns them; attention only appends and reads."""

from jaxtyping import Float, Int
from torch import Tensor


class LayerCache:
    """Keys and values of one attention, in a buffer that doubles when full, so appending is amortised O(1)."""

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self.length = 0

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
        if not self.length:  # empty, or cut to nothing
            self._key, self._value = key, value
        else:
            if end > self._key.shape[2]:
                self._key, self._value = self._grown(self._key, end), self._grown(self._value, end)
            self._key[:, :, self.length : end] = key
            self._value[:, :, self.length : end] = value
        self.length = end
        return self.key, self.value

    def _grown(self, held: Tensor, need: int) -> Tensor:
        batch, heads, _, width = held.shape
        room = held.new_empty(batch, heads, max(2 * self.length, need, 32), width)
        room[:, :, : self.length] = held[:, :, : self.length]
        return room

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        """Keeps these rows of the batch, in this order (beam search)."""
        if self._key is not None:
            self._key, self._value = self._key[rows], self._value[rows]

    def cut(self, length: int) -> None:
        """Forgets the positions from `length` on."""
        self.length = min(self.length, length)


class Cache:
    """The caches of a stack: one for self-attention and one for cross-attention per layer."""

    def __init__(self, layers: int) -> None:
        self.self_attention = [LayerCache() for _ in range(layers)]
        self.cross_attention = [LayerCache() for _ in range(layers)]

    @property
    def length(self) -> int:
        """Positions already seen by self-attention."""
        return self.self_attention[0].length

    def reorder(self, rows: Int[Tensor, "B"]) -> None:
        for layer in self.self_attention + self.cross_attention:
            layer.reorder(rows)

    def cut(self, length: int) -> None:
        """Forgets the target positions from `length` on; the source stays."""
        for layer in self.self_attention:
            layer.cut(length)
