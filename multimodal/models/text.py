"""Text towers and decoders: an embedding, positions and a stack."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.blocks.layers import ACTIVATIONS, make_norm
from multimodal.blocks.masks import causal, over_keys
from multimodal.blocks.stack import Stack, StackConfig


@dataclass(frozen=True)
class TextConfig:
    """`context`: positions that exist. `tied`: logits through the embedding's transpose; None: no logits.

    `stem_norm`: a norm before the blocks; `transform`: a linear map, activation and norm before the logits;
    `head_bias`: logits have a bias (BERT has all three, Devlin et al. 2019)."""

    vocabulary: int
    context: int
    stack: StackConfig
    causal: bool
    tied: bool | None = None
    stem_norm: bool = False
    transform: bool = False
    head_bias: bool = False

    @property
    def width(self) -> int:
        return self.stack.block.attention.width


class Transform(nn.Module):
    """norm(act(linear x)): what BERT does with states before their logits."""

    def __init__(self, width: int, activation: str, norm: str, norm_eps: float):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), make_norm(norm, width, norm_eps)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.norm(self.activation(self.linear(x)))


class TextTransformer(nn.Module):
    """Token and position embeddings, a stack, and logits where the configuration asks for them."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(torch.empty(config.context, config.width).normal_(std=0.01))
        nn.init.normal_(self.embed.weight, std=0.02)
        block = config.stack.block
        self.norm = make_norm(block.norm, config.width, block.norm_eps) if config.stem_norm else None
        self.stack = Stack(config.stack)
        transform = Transform(config.width, block.activation, block.norm, block.norm_eps) if config.transform else None
        self.transform = transform
        # any module from states to logits; a tied decoder has none and takes the embedding's transpose
        self.head = nn.Linear(config.width, config.vocabulary, bias=config.head_bias) if config.tied is False else None
        bias = nn.Parameter(torch.zeros(config.vocabulary)) if config.tied and config.head_bias else None
        self.tied_bias = bias

    def stem(self, ids: Int[Tensor, "B T"], past: int = 0, cache: Cache | None = None) -> Float[Tensor, "B T D"]:
        """What the stack gets: tokens and their positions, of which the first is at `past`. Raises ValueError for a
        text that is longer than the context."""
        x = self.embed(ids) + self._positions(past, ids.shape[1], cache)
        return x if self.norm is None else self.norm(x)

    def states(
        self,
        ids: Int[Tensor, "B T"],
        source: Float[Tensor, "P S _"] | None = None,
        source_valid: Bool[Tensor, "P S"] | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        only: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B _ D"]:
        """`valid` marks real tokens of rows padded on the right; it is not for cached calls, whose rows are padded
        on the left (see `new_cache`). With a cache `source` and `source_valid` are read on the first call only. B
        may be a multiple of P: then equally many rows in a row attend to each source. `only`: the one position of each
        row that is wanted."""
        past = cache.length if cache else 0
        x = self.stem(ids, past, cache)
        mask = self._mask(past, ids.shape[1], cache, ids.device)
        if valid is not None:
            mask = over_keys(valid) if mask is None else mask & over_keys(valid)
        source_mask = None
        if cache is not None and cache.has_source:
            source_mask = cache.source_mask
        elif source is not None and source_valid is not None:
            source, source_mask = torch.where(source_valid[..., None], source, 0), over_keys(source_valid)
            if cache is not None:
                cache.source_mask = source_mask
        return self.stack(x, source, mask, source_mask, valid, cache=cache, only=only)

    def _positions(self, past: int, count: int, cache: Cache | None) -> Float[Tensor, "*B T D"]:
        context, index = self.config.context, cache.text_positions(count) if cache else None
        if past + count > context and (index is None or not past):
            raise ValueError(f"text of {past + count} tokens is longer than the context {context}")
        # in the padding, and past the end of rows that have ended while others go on, any position will do
        return self.positions[past : past + count] if index is None else self.positions[index.clamp(0, context - 1)]

    def _mask(self, past: int, count: int, cache: Cache | None, device: torch.device) -> Bool[Tensor, "..."] | None:
        mask = causal(count, past + count, device) if self.config.causal and count > 1 else None
        real = cache.real(count) if cache else None
        if real is None:
            return mask
        return over_keys(real) if mask is None else mask & over_keys(real)

    def logits(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        states = states if self.transform is None else self.transform(states)
        if self.head is not None:
            return self.head(states)
        return nn.functional.linear(states, self.embed.weight, self.tied_bias)

    def forward(
        self, ids: Int[Tensor, "B T"], source: Float[Tensor, "P S _"] | None = None,
        source_valid: Bool[Tensor, "P S"] | None = None, valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None, last: int | None = None,
    ) -> Float[Tensor, "B N V"]:  # fmt: skip
        """Next-token logits, of all positions or of the `last` ones alone."""
        states = self.states(ids, source, source_valid, valid, cache)
        return self.logits(states if last is None else states[:, -last:])

    def new_cache(self, start: Int[Tensor, "B"] | None = None, room: int = 0) -> Cache:
        """`start`: how many ids at the begin of each row are padding (left padding, for prompts of different
        length). `room`: positions to make room for at once, where the length is known."""
        cache = Cache(self.config.stack.layers, start, room)
        cache.context = self.config.context
        return cache
