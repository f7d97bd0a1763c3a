"""Decoding without the price of launches: a step whose shapes and addresses never change, replayed as a CUDA graph.

The prompt runs as it always does. Its keys and values then move into buffers of fixed size; each later step writes one
position there and attends to all of them under a mask. On a CUDA device that step is captured once for its shapes and
replayed from then on. Elsewhere the same function is called, which gains nothing.
"""

import warnings
import weakref
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.sampling import Step, over_source
from multimodal.inference.static_cache import MovingCache, StaticCache
from multimodal.models.text import TextTransformer

REPLAYING = ("cuda",)  # kinds of device
KEPT, KEPT_BYTES = 8, 4 << 30  # of buffers with their graphs, a decoder, that wait for the next batch of their shapes
_kept: weakref.WeakKeyDictionary[TextTransformer, list["_Slot"]] = weakref.WeakKeyDictionary()


def fast_step(
    decoder: TextTransformer, source: Float[Tensor, "P S D"] | None, start: Int[Tensor, "B"] | None, room: int,
    valid: Bool[Tensor, "P S"] | None = None, last: int | None = None,
) -> tuple[Step, Cache]:  # fmt: skip
    """A step and its cache for `search`: static on a device that replays graphs, else as `over_source`'s. `source`:
    None for a decoder without cross-attention."""
    if decoder.device.type in REPLAYING and not decoder.config.stack.block.attention.relative:
        return static_step(decoder, source, start, room, valid, last)
    return over_source(partial(decoder, last=last), source, valid), decoder.new_cache(start)


def static_step(
    decoder: TextTransformer, source: Float[Tensor, "P S D"] | None, start: Int[Tensor, "B"] | None, room: int,
    valid: Bool[Tensor, "P S"] | None = None, last: int | None = None,
) -> tuple[Step, MovingCache]:  # fmt: skip
    """A step and its cache that are static after the prompt.

    `room`: positions that are wanted, prompt included. `last`: how many of the prompt's positions get logits. The room
    and the number of sources are rounded up to powers of two, so that few shapes are captured. Logits hold until the
    next step. Raises ValueError where the room or the table of positions is full, and for Transformer-XL's relative
    positions."""
    if decoder.config.stack.block.attention.relative:
        raise ValueError("a static step has no relative positions")
    cache = MovingCache(decoder.config.stack.layers, start, _rounded(max(room, 64)))
    cache.context = decoder.config.limit

    @torch.inference_mode()
    def step(ids: Int[Tensor, "B T"], cache: MovingCache) -> Float[Tensor, "B N V"]:
        if not cache.length:
            return decoder(ids, source, valid, cache=cache, last=last)
        most = cache.room if cache.start is not None or cache.context is None else min(cache.room, cache.context)
        if ids.shape[1] != 1 or cache.length >= most:
            raise ValueError(f"{ids.shape[1]} ids after {cache.length} positions: one at a time, {most} at most")
        if cache.slot is None:
            slot = _slot(decoder, cache, len(ids))
            slot.owner = weakref.ref(cache)
            cache.move(slot)
        cache.seen += 1
        return cache.slot.step(decoder, ids)

    return step, cache


class _Slot(StaticCache):
    """All that a step reads and writes: the cache of R rows, ids [R 1] and logits [R 1 V]. Rows that nobody uses are
    computed too. `shapes`: whom it fits; `owner` gives the cache that has moved in, None once that is gone."""

    def __init__(self, like: Cache, rows: int, sources: int, room: int, shapes: tuple[Any, ...]) -> None:
        super().__init__(like, rows, sources, room)
        self.ids, self.shapes = torch.zeros(rows, 1, dtype=torch.long, device=self.at.device), shapes
        self.owner, self.graph, self.logits = lambda: None, None, None

    def step(self, decoder: TextTransformer, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 V"]:
        self.ids[: len(ids)] = ids
        if self.graph is None:
            self.logits = self.forward(decoder)
        else:
            self.graph.replay()
        return self.logits[: len(ids)]

    def forward(self, decoder: TextTransformer) -> Float[Tensor, "R 1 V"]:
        """The function that is captured."""
        # a cross-attention that holds its keys does not read the source
        source = decoder.embed.weight.new_empty(1, 0, decoder.config.width) if self.has_source else None
        logits = decoder(self.ids, source, cache=self)
        self.at.add_(1)
        return logits

    def capture(self, decoder: TextTransformer) -> None:
        """As PyTorch's notes on CUDA graphs: libraries set themselves up in calls on a side stream before."""
        device = self.ids.device
        before, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(before)
        with torch.cuda.stream(side):
            for _ in range(3):
                self.forward(decoder)
        before.wait_stream(side)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        # thread_local: other threads may use the device meanwhile. A capture that fails does not leave its stream.
        with torch.cuda.stream(before), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.logits = self.forward(decoder)
        self.graph = graph


def _slot(decoder: TextTransformer, held: Cache, rows: int) -> _Slot:
    """A slot for these rows that no living cache is in."""
    first, key = held.cross_attention[0].key if held.has_source else None, held.self_attention[0].key
    count = rows if first is None else len(first)
    sources = _rounded(count)
    sizes = rows // count * sources, sources, held.room
    # a graph would keep the copies that autocast makes of the weights
    graph = key.device.type in REPLAYING and not torch.is_autocast_enabled(key.device.type)
    shapes = (
        *sizes, None if first is None else first.shape[2], held.source_mask is None, key.dtype, key.device,
        decoder.training, graph, *(tensor.data_ptr() for tensor in [*decoder.parameters(), *decoder.buffers()]),
    )  # fmt: skip
    kept = _kept.setdefault(decoder, [])
    found = next((slot for slot in kept if slot.shapes == shapes and slot.owner() is None), None)
    if found is None:
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
            found = _Slot(held, *sizes, shapes)
        if graph:
            try:
                found.capture(decoder)
            except RuntimeError as error:
                cause = str(error).partition("\n")[0]
                warnings.warn(f"decoding goes on without a CUDA graph: {cause}", stacklevel=2)
    kept[:] = [slot for slot in kept if slot is not found] + [found]
    while len(kept) > KEPT or (len(kept) > 1 and sum(slot.nbytes for slot in kept) > KEPT_BYTES):
        del kept[0]
    return found


def _rounded(count: int) -> int:
    """Up to a power of two."""
    return 1 << (count - 1).bit_length()
