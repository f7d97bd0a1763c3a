"""Decoding steps replayed as CUDA graphs, without the cost of kernel launches.

The prompt runs as usual. Its keys and values then move into buffers of fixed size; each later step writes one position
there and attends to all of them under a mask. On a CUDA device the step is captured once for its shapes and then
replayed. On other devices the same function is called, which is no faster."""

import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from multimodal.blocks.cache import Cache
from multimodal.decoding.captured import SearchRules, SearchState
from multimodal.decoding.captured_sampling import captured_steps, sampling_rules
from multimodal.decoding.sampling import Ends, LogitsProcessor, SampledTokens, Sampler, Step, cross_attention_step
from multimodal.inference.modules import Frozen, Replacement
from multimodal.inference.static_cache import MovingCache, StaticCache
from multimodal.models.text import TextTransformer

REPLAYING = ("cuda",)  # device types
KEPT, KEPT_BYTES = 8, 4 << 30  # idle buffers with their graphs that a decoder keeps for batches of the same shapes


class GraphDecoder(Replacement, Frozen, TextTransformer):
    """A decoder that keeps the buffers and graphs of its static steps. Graphs read its weights by address, hence
    `Frozen`. Raises ValueError for a decoder without `has_static_step`."""

    def __init__(self, decoder: TextTransformer):
        if not has_static_step(decoder):
            raise ValueError("static steps do not support relative positions, experts, groups and patterns of layers")
        super().__init__(decoder)
        self.slots: list[_Slot] = []


def has_static_step(decoder: TextTransformer) -> bool:
    """True if a step of the decoder needs neither the host nor a fixed length."""
    config, stack = decoder.config, decoder.config.stack
    # the host counts the tokens of each expert, the rows of each group; patterns and switches need the length
    counted = stack.block.experts or stack.groups or config.pattern or config.positions.switch
    return not (stack.block.attention.relative or counted)


def fast_step(
    decoder: TextTransformer, source: Float[Tensor, "P S D"] | None, start: Int[Tensor, "B"] | None, capacity: int,
    valid: Bool[Tensor, "P S"] | None = None, last: int | None = None,
) -> tuple[Step, Cache]:  # fmt: skip
    """A step and its cache for `multimodal.decoding`: static for a `GraphDecoder`, else a plain one. `source`: None for
    a decoder without cross-attention."""
    if isinstance(decoder, GraphDecoder):
        return static_step(decoder, source, start, capacity, valid, last)
    return cross_attention_step(partial(decoder, last=last), source, valid), decoder.new_cache(start)


def static_step(
    decoder: GraphDecoder, source: Float[Tensor, "P S D"] | None, start: Int[Tensor, "B"] | None, capacity: int,
    valid: Bool[Tensor, "P S"] | None = None, last: int | None = None,
) -> tuple[Step, MovingCache]:  # fmt: skip
    """A step that is static after the prompt, and its cache.

    `capacity`: positions needed, prompt included. `last`: how many of the prompt's positions get logits. The capacity
    and the number of sources are rounded up to powers of two, so that few shapes are captured. Logits are valid until
    the next step. The step raises ValueError beyond the capacity or the context."""
    cache = MovingCache(decoder.config.stack.layers, start, _rounded(max(capacity, 64)))
    cache.context = decoder.config.limit
    if _replays(decoder.embed.weight.device):
        cache.start_search = partial(_start_search, decoder, weakref.ref(cache))
        cache.generate = partial(_generate, weakref.ref(cache))

    @torch.inference_mode()
    def step(ids: Int[Tensor, "B T"], cache: MovingCache) -> Float[Tensor, "B N V"]:
        if not cache.length:
            return decoder(ids, source, valid, cache=cache, last=last)
        if cache.slot is None:
            _move(decoder, cache, len(ids))
        _count(cache, ids.shape[1])
        return cache.slot.step(decoder, ids)

    return step, cache


def _generate(
    owner: Callable[[], MovingCache], step: Step, prompt: Int[Tensor, "B T"], eos: Ends, max_new: int | Sequence[int],
    processors: Sequence[LogitsProcessor], choose: Sampler | None, copies: int,
) -> Generator[Tensor, None, SampledTokens] | None:  # fmt: skip
    cache, rules = owner(), sampling_rules(processors, eos, prompt, choose, copies)
    if rules is None or cache.length:
        return None
    return captured_steps(cache.start_search, step, prompt, cache, rules, max_new, choose)


def _start_search(
    decoder: GraphDecoder, owner: Callable[[], MovingCache], rules: SearchRules, rows: int, vocabulary: int
) -> tuple[SearchState, Callable[[], None]]:
    cache = owner()
    slot = _move(decoder, cache, rows, rules, vocabulary)

    def advance() -> None:
        _count(cache, 1)
        slot.advance(decoder)

    return slot.state, advance


def _move(
    decoder: GraphDecoder, cache: MovingCache, rows: int, rules: SearchRules | None = None, vocabulary: int = 0
) -> "_Slot":
    slot = _slot(decoder, cache, rows, rules, vocabulary)
    slot.owner = weakref.ref(cache)
    cache.move(slot)
    return slot


def _count(cache: MovingCache, ids: int) -> None:
    """Count the next position. Raises ValueError if there is no room for it."""
    most = cache.capacity if cache.start is not None else min(cache.capacity, cache.context or cache.capacity)
    if ids != 1 or cache.length >= most:
        raise ValueError(f"{ids} ids after {cache.length} positions: one at a time, {most} at most")
    cache.seen += 1


def _replays(device: torch.device) -> bool:
    # a graph would keep autocast's copies of the weights
    return device.type in REPLAYING and not torch.is_autocast_enabled(device.type)


class _Slot(StaticCache):
    """All that a step reads and writes: the cache of R rows, ids [R 1] and logits [R 1 V], of unused rows too; or the
    state of a search. `shapes`: of the batches that fit; `owner`: a weak reference to the cache that uses it."""

    def __init__(
        self, like: Cache, rows: int, sources: int, capacity: int, shapes: tuple[Any, ...],
        rules: SearchRules | None = None, vocabulary: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(like, rows, sources, capacity)
        self.state = None if rules is None else rules.state(rows, capacity, vocabulary, self.at.device)
        self.nbytes += 0 if self.state is None else self.state.nbytes
        self.ids, self.shapes = torch.zeros(rows, 1, dtype=torch.long, device=self.at.device), shapes
        self.owner, self.graph, self.logits = lambda: None, None, None

    def step(self, decoder: TextTransformer, ids: Int[Tensor, "B 1"]) -> Float[Tensor, "B 1 V"]:
        self.ids[: len(ids)] = ids
        self.advance(decoder)
        return self.logits[: len(ids)]

    def advance(self, decoder: TextTransformer) -> None:
        if self.graph is None:
            self.logits = self.forward(decoder)
        else:
            self.graph.replay()

    def forward(self, decoder: TextTransformer) -> Float[Tensor, "R 1 V"] | None:
        """The function that is captured."""
        # cross-attention with cached keys does not read the source
        source = decoder.embed.weight.new_empty(1, 0, decoder.config.width) if self.has_source else None
        logits = decoder(self.ids if self.state is None else self.state.token[:, None], source, cache=self)
        self.at.add_(1)
        if self.state is None:
            return logits
        row = logits[:, -1].to(torch.float32, memory_format=torch.contiguous_format)
        self.state.take(self, self.state.processed(row, self.at - 1), self.at)
        return None

    def capture(self, decoder: TextTransformer) -> None:
        """Warm up on a side stream, then capture, as in PyTorch's notes on CUDA graphs."""
        device = self.ids.device
        before, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        side.wait_stream(before)
        with torch.cuda.stream(side):
            for _ in range(3):
                self.forward(decoder)
        before.wait_stream(side)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        # thread_local: other threads may use the device meanwhile. A failed capture stays on its stream.
        with torch.cuda.stream(before), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.logits = self.forward(decoder)
        self.graph = graph


def _slot(decoder: GraphDecoder, cache: Cache, rows: int, rules: SearchRules | None, vocabulary: int) -> _Slot:
    """An idle slot for these rows, new where the decoder has none."""
    first, key = cache.cross_attention[0].key if cache.has_source else None, cache.self_attention[0].key
    count = len(first) if first is not None else rows if rules is None else rows // rules.width
    sources = _rounded(count)
    sizes = rows // count * sources, sources, cache.capacity
    replayed, search = _replays(key.device), None if rules is None else rules.key
    shapes = *sizes, None if first is None else first.shape[2], cache.source_mask is None, key.dtype, replayed, search
    slots = decoder.slots
    slot = next((slot for slot in slots if slot.shapes == shapes and slot.owner() is None), None)
    if slot is None:
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be written outside of it
            slot = _Slot(cache, *sizes, shapes, rules, vocabulary)
        if replayed:
            try:
                slot.capture(decoder)
            except RuntimeError as error:
                cause = str(error).partition("\n")[0]
                warnings.warn(f"decoding continues without a CUDA graph: {cause}", stacklevel=2)
    slots[:] = [other for other in slots if other is not slot] + [slot]
    while len(slots) > KEPT or (len(slots) > 1 and sum(slot.nbytes for slot in slots) > KEPT_BYTES):
        del slots[0]
    return slot


def _rounded(count: int) -> int:
    """Up to a power of two."""
    return 1 << (count - 1).bit_length()
