"""Text towers and decoders: an embedding, positions and a stack."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import causal, over_keys
from multimodal.blocks.stack import Stack, StackConfig


@dataclass(frozen=True)
class TextConfig:
    """`context`: positions that exist. `tied`: logits through the embedding's transpose; None: no logits."""

    vocabulary: int
    context: int
    stack: StackConfig
    causal: bool
    tied: bool | None = None

    @property
    def width(self) -> int:
        return self.stack.block.attention.width


class TextTransformer(nn.Module):
    """Token and position embeddings, a stack, and logits where the configuration asks for them."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Parameter(torch.empty(config.context, config.width).normal_(std=0.01))
        nn.init.normal_(self.embed.weight, std=0.02)
        self.stack = Stack(config.stack)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False) if config.tied is False else None

    def states(
        self,
        ids: Int[Tensor, "B T"],
        source: Float[Tensor, "B S _"] | None = None,
        source_valid: Bool[Tensor, "B S"] | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """`valid` marks real tokens of rows padded on the right; it is not for cached calls."""
        past = cache.length if cache else 0
        count = ids.shape[1]
        if past + count > self.config.context:
            raise ValueError(f"text of {past + count} tokens is longer than the context {self.config.context}")
        x = self.embed(ids) + self.positions[past : past + count]
        mask = causal(count, past + count, ids.device) if self.config.causal and count > 1 else None
        if valid is not None:
            mask = over_keys(valid) if mask is None else mask & over_keys(valid)
        source_mask = None
        if source is not None and source_valid is not None:
            source, source_mask = torch.where(source_valid[..., None], source, 0), over_keys(source_valid)
        return self.stack(x, source, mask, source_mask, valid, cache=cache)

    def logits(self, states: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        if self.head is not None:
            return self.head(states)
        return nn.functional.linear(states, self.embed.weight)

    def forward(
        self, ids: Int[Tensor, "B T"], source: Float[Tensor, "B S _"] | None = None,
        source_valid: Bool[Tensor, "B S"] | None = None, valid: Bool[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        """Next-token logits."""
        return self.logits(self.states(ids, source, source_valid, valid, cache))

    def new_cache(self) -> Cache:
        return Cache(self.config.stack.layers)
