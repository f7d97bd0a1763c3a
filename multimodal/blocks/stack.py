"""The transformer block and the stack of blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import Cache, LayerCache
from multimodal.blocks.layers import DropPath, FeedForward, LayerScale, make_norm


@dataclass(frozen=True)
class BlockConfig:
    """One block: self-attention, optional cross-attention, feed-forward."""

    attention: AttentionConfig
    hidden: int
    activation: str = "gelu"
    gated: bool = False
    norm: str = "layer"
    norm_eps: float = 1e-5
    post_norm: bool = False  # norm(x + f(x)) (Vaswani et al. 2017) instead of x + f(norm(x))
    cross: AttentionConfig | None = None
    layer_scale: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class StackConfig:
    """`shared` distinct blocks are reused in turn over `layers` (ALBERT shares 1); None: each has its own."""

    block: BlockConfig
    layers: int
    final_norm: bool = True
    shared: int | None = None
    drop_path: float = 0.0
    checkpointing: bool = False  # recompute activations in backward


class Branch(nn.Module):
    """norm, layer scale and drop path around one residual branch: x + f(norm(x)) or norm(x + f(x))."""

    def __init__(self, config: BlockConfig, drop_path: float):
        super().__init__()
        width = config.attention.width
        self.norm = make_norm(config.norm, width, config.norm_eps)
        self.scale = LayerScale(width) if config.layer_scale else None
        self.drop = nn.Sequential(nn.Dropout(config.dropout), DropPath(drop_path))
        self.post = config.post_norm

    def forward(self, x: Float[Tensor, "B T D"], function: Callable[[Tensor], Tensor]) -> Float[Tensor, "B T D"]:
        branch = function(x if self.post else self.norm(x))
        branch = branch if self.scale is None else self.scale(branch)
        x = x + (self.drop(branch) if self.training else branch)
        return self.norm(x) if self.post else x


class Block(nn.Module):
    def __init__(self, config: BlockConfig, drop_path: float = 0.0):
        super().__init__()
        self.attention = Attention(config.attention)
        self.attention_branch = Branch(config, drop_path)
        self.cross = Attention(config.cross) if config.cross else None
        self.cross_branch = Branch(config, drop_path) if config.cross else None
        self.feed = FeedForward(
            config.attention.width, config.hidden, config.activation, config.gated, config.attention.bias,
            config.dropout,
        )  # fmt: skip
        self.feed_branch = Branch(config, drop_path)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        source: Float[Tensor, "P S _"] | None = None,
        mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        rotate: Callable | None = None,
        caches: tuple[LayerCache, LayerCache] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """B may be a multiple of P: then equally many rows in a row attend to each source."""
        own, crossed = caches or (None, None)
        x = self.attention_branch(x, lambda h: self.attention(h, mask=mask, rotate=rotate, cache=own))
        if self.cross is not None:
            sources = len(source if crossed is None or crossed.key is None else crossed.key)

            def attend(h: Tensor) -> Tensor:  # rows of one source are more queries to it
                queries = h.reshape(sources, -1, h.shape[-1])
                return self.cross(queries, source, mask=source_mask, cache=crossed).reshape(h.shape)

            x = self.cross_branch(x, attend)
        return self.feed_branch(x, self.feed)


class Stack(nn.Module):
    """Blocks in a row. `valid` zeroes padded positions at the input, since NaN leaks through a mask."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config, self.checkpointing = config, config.checkpointing
        count = config.shared or config.layers
        rates = [config.drop_path * i / max(count - 1, 1) for i in range(count)]
        self.blocks = nn.ModuleList(Block(config.block, rate) for rate in rates)
        block = config.block
        self.norm = make_norm(block.norm, block.attention.width, block.norm_eps) if config.final_norm else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        source: Float[Tensor, "P S _"] | None = None,
        mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        rotate: Callable | None = None,
        cache: Cache | None = None,
        states: list[Tensor] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """`states`, where given, receives the input of each block and then the output after the final norm."""
        if valid is not None:
            x = torch.where(valid[..., None], x, 0)
        for layer in range(self.config.layers):
            if states is not None:
                states.append(x)
            block = self.blocks[layer % len(self.blocks)]
            caches = (cache.self_attention[layer], cache.cross_attention[layer]) if cache else None
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, source, mask, source_mask, rotate, caches, use_reentrant=False)
            else:
                x = block(x, source, mask, source_mask, rotate, caches)
        x = x if self.norm is None else self.norm(x)
        if states is not None:
            states.append(x)
        return x


def transformer(
    width: int, layers: int, heads: int, hidden: int, *, activation: str = "gelu", norm_eps: float = 1e-5,
    source_width: int | None = None, key_bias: bool = True, layer_scale: bool = False, dropout: float = 0.0,
    drop_path: float = 0.0, final_norm: bool = True, checkpointing: bool = False,
) -> StackConfig:  # fmt: skip
    """The common case: pre-norm LayerNorm blocks of multi-head attention, with cross-attention where
    `source_width` is given."""
    own = AttentionConfig(width, heads, key_bias=key_bias)
    cross = AttentionConfig(width, heads, key_bias=key_bias, source_width=source_width) if source_width else None
    block = BlockConfig(own, hidden, activation, norm_eps=norm_eps, cross=cross, layer_scale=layer_scale,
                        dropout=dropout)  # fmt: skip
    return StackConfig(block, layers, final_norm, drop_path=drop_path, checkpointing=checkpointing)
