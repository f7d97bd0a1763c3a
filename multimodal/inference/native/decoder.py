"""A decoder whose single-token steps are one call of the compiled library."""

import ctypes
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache, KeyValue, LayerCache
from multimodal.blocks.capture import capturing
from multimodal.blocks.layers import FeedForward
from multimodal.inference.fused_decoder import FusedBlock
from multimodal.inference.modules import Frozen, Replacement
from multimodal.inference.native import library as native
from multimodal.inference.native.linear import ACTIVATIONS, NativeLinear
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import rotary_positions


class NativeDecoder(Replacement, Frozen, TextTransformer):
    """A decoder that takes one new position of each row in one call, where nothing is captured and the cache is plain;
    other calls take the way of its blocks, through the same maps."""

    def __init__(self, decoder: TextTransformer):
        super().__init__(decoder)
        self.halves: WeakKeyDictionary[LayerCache, tuple[Tensor, Tensor, Tensor]] = WeakKeyDictionary()
        # of heads and distances, the last for distance 0
        self.biases = torch.empty(0, 0, dtype=torch.float32, device="cpu")

    def forward(
        self, ids: Int[Tensor, "B T"], source: Float[Tensor, "P S _"] | None = None,
        source_valid: Bool[Tensor, "P S"] | None = None, valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None, last: int | None = None, embedded: Float[Tensor, "B T E"] | None = None,
    ) -> Float[Tensor, "B N V"]:  # fmt: skip
        """See `TextTransformer.forward`."""
        if ids.shape[1] != 1 or valid is not None or cache is None or not self._takes(cache):
            return super().forward(ids, source, source_valid, valid, cache, last, embedded)
        return self._step(self.stem(ids, cache.length, cache, embedded=embedded)[:, 0], cache)

    def new_cache(self, start: Int[Tensor, "B"] | None = None, capacity: int = 0) -> Cache:
        """See `TextTransformer.new_cache`."""
        cache = super().new_cache(start, capacity)
        cache.best = best
        return cache

    def _takes(self, cache: Cache) -> bool:
        return (
            type(cache) is Cache and cache.length > 0 and not capturing()
            and cache.has_source == bool(self.config.stack.block.cross)
            and cache.self_attention[0].key.dtype == torch.float32
        )  # fmt: skip

    def _step(self, x: Float[Tensor, "B D"], cache: Cache) -> Float[Tensor, "B 1 V"]:
        rows, length, x = len(x), cache.length, x.float().contiguous()
        step, logits = native.TokenRecord(), x.new_empty(rows, 1, self.config.vocabulary)
        own = [layer.reserve(1) for layer in cache.self_attention]
        kept = [x, logits, cache.start]
        step.x, step.logits, step.rows, step.length = x.data_ptr(), logits.data_ptr(), rows, length
        step.keys, step.values = (_pointers(side, kept) for side in zip(*own, strict=True))
        step.capacities = _numbers([key.shape[2] for key, _ in own], kept)
        step.starts = 0 if cache.start is None else cache.start.data_ptr()
        if cache.has_source:
            self._add_source(step, cache, kept)
        self._add_positions(step, cache, kept)
        step.threads = torch.get_num_threads()
        native.library().step(self.described, ctypes.addressof(step))
        for layer in cache.self_attention:
            layer.length += 1
        return logits

    def _add_source(self, step: native.TokenRecord, cache: Cache, kept: list) -> None:
        sides = zip(*map(self._source, cache.cross_attention), strict=True)
        step.source_keys, step.source_values = (_pointers(side, kept) for side in sides)
        step.sources, _, step.source_length, _ = cache.cross_attention[0].key.shape
        step.source_halves = self.head.int8
        if cache.source_mask is not None:
            kept.append(seen := cache.source_mask.expand(-1, 1, 1, step.source_length).contiguous())
            step.seen = seen.data_ptr()

    def _source(self, layer: LayerCache) -> KeyValue:
        """Keys and values; beside int8 maps in bfloat16, since reading them takes as long as half of the weights."""
        key, value = layer.reserve(0)
        if not self.head.int8:
            return key, value
        if (held := self.halves.get(layer)) is None or held[0] is not key:
            held = self.halves[layer] = key, key.bfloat16(), value.bfloat16()
        return held[1:]

    def _add_positions(self, step: native.TokenRecord, cache: Cache, kept: list) -> None:
        config, length = self.config.positions, cache.length
        if config.kind == "rotary":
            index = self._numbers(length, 1, self._index(length, 1, cache, None))
            turn = rotary_positions(config, index, self.config.stack.block.attention)
            for name in ("cos", "sin"):
                kept.append(table := getattr(turn, name).flatten(0, -2).contiguous())
                setattr(step, name, table.data_ptr())
            step.turns, step.interleaved = len(table), turn.interleaved
        elif config.kind in ("bucket", "alibi"):
            if length >= self.biases.shape[1]:
                self.biases = self._bias(2 * length + 63, 1, None)[:, 0].contiguous()
            step.bias, step.bias_capacity = self.biases.data_ptr(), self.biases.shape[1]

    @cached_property
    def described(self) -> int:
        """Address of the description for `step`, made on first use, when the maps have their places."""
        own, block = self.stack.blocks[0].attention, self.stack.blocks[0]
        cross = (0, 0) if block.cross is None else (block.cross.heads, block.cross.head_width)
        layers = [self.stack.blocks[at % len(self.stack.blocks)] for at in range(self.config.stack.layers)]
        made = native.DecoderRecord(
            (native.LayerRecord * len(layers))(*map(_layer, layers)), _norm(self.stack.norm), self.head.map,
            len(layers), self.config.width, own.heads, own.kv_heads, own.head_width, *cross,
            ACTIVATIONS[block.feed.activation],
        )  # fmt: skip
        self.kept = made
        return ctypes.addressof(made)


def best(logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, "B"], Float[Tensor, "B"]]:
    """Each row's most probable token, the first of equals, and its log-probability."""
    logits = logits.contiguous()
    tokens, logprobs = logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
    places = logits.data_ptr(), *logits.shape, tokens.data_ptr(), logprobs.data_ptr()
    native.library().best(*places)
    return tokens, logprobs


def has_native_step(decoder: TextTransformer) -> bool:
    """Return True if all of its maps are native and its blocks have what a compiled step has."""
    config = decoder.config
    return (
        isinstance(decoder.head, NativeLinear) and decoder.transform is None and not config.narrow
        and config.window is None
        and config.pattern is None and config.logit_cap is None and config.positions.share is None
        and not config.positions.layered and config.positions.switch is None and not config.languages
        and all(map(_is_native, decoder.stack.blocks))
    )  # fmt: skip


def _is_native(block: nn.Module) -> bool:
    if not isinstance(block, FusedBlock) or type(block.feed) is not FeedForward:
        return False
    if block.attention.query_norm is not None:
        return False
    maps = [part for part in block.modules() if isinstance(part, nn.Linear | Frozen)]
    return all(isinstance(part, NativeLinear) for part in maps) and block.feed.activation in ACTIVATIONS


def _norm(norm: nn.Module | None) -> native.NormRecord:
    if norm is None:
        return native.NormRecord()
    root = isinstance(norm, nn.RMSNorm)
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    return native.NormRecord(norm.weight.data_ptr(), 0 if root else norm.bias.data_ptr(), eps, root)


def _layer(block: FusedBlock) -> native.LayerRecord:
    own, cross, feed = block.attention, block.cross, block.feed
    branches = block.attention_branch, block.cross_branch, block.feed_branch
    maps = {"qkv": own.qkv, "out": own.out, "gate": feed.gate, "up": feed.up, "down": feed.down}
    maps |= {} if cross is None else {"query": cross.query, "cross_out": cross.out}
    norms = (native.NormRecord * 3)(*(_norm(None if one is None else one.norm) for one in branches))
    made = native.LayerRecord(norms, scale=own.scale, cross_scale=0 if cross is None else cross.scale)
    for name, part in maps.items():
        if part is not None:
            setattr(made, name, part.map)
    return made


def _pointers(tensors: Sequence[Tensor], kept: list) -> int:
    kept.append(array := (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors]))
    kept.extend(tensors)
    return ctypes.addressof(array)


def _numbers(values: Sequence[int], kept: list) -> int:
    kept.append(array := (ctypes.c_int64 * len(values))(*values))
    return ctypes.addressof(array)
