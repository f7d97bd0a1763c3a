"""The transformer block and the stack of blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.blocks.attention import Attention, AttentionConfig
from multimodal.blocks.cache import Cache, LayerCache
from multimodal.blocks.capture import capturing
from multimodal.blocks.experts import Experts, ExpertsConfig, GroupedFeed
from multimodal.blocks.layers import DropPath, FeedForward, LayerScale, has_hooks, make_norm
from multimodal.blocks.linear_attention import LinearAttention
from multimodal.blocks.masks import Causal, merge
from multimodal.blocks.positions import Disentangled, GatedBias
from multimodal.blocks.sdpa import recompute_contexts


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
    pre_norm: bool = True  # False: x + f(x)
    own_norm: bool = True  # False: the same for self-attention alone
    out_norm: bool = False  # x + norm(f(…)): beside a norm before (Gemma 2) or in its place (OLMo 2)
    residual_scale: float = 1.0  # factor of f (Granite)
    parallel: str | None = None  # both branches read x (GPT-NeoX), with one norm for each, "two", or for both, "one"
    cross: AttentionConfig | None = None
    cross_block: bool = False  # cross-attention is a block of its own: after a feed-forward, with a normed source
    layer_scale: bool = False
    dropout: float = 0.0
    feed_bias: bool | None = None  # of the feed-forward; None: as attention's
    feed_norm: bool = False  # a LayerNorm inside of the feed-forward (EVA-02)
    experts: ExpertsConfig | None = None  # a mixture of feed-forwards in place of one, in some or all blocks

    def __post_init__(self) -> None:
        if self.parallel not in (None, "one", "two") or (self.parallel and (self.cross or self.post_norm)):
            raise ValueError(f"parallel {self.parallel!r}: expected one or two norms, no cross-attention, no post_norm")


@dataclass(frozen=True)
class StackConfig:
    """`shared`: number of distinct blocks, reused in turn (ALBERT: 1); None: one for each of the `layers`. `groups`:
    feed-forwards of each of the last `grouped` blocks, one for each group of rows (M2M-100's language-specific
    layers)."""

    block: BlockConfig
    layers: int
    final_norm: bool = True
    first_norm: bool = True  # False: the first block's attention reads its input as it is (ModernBERT)
    shared: int | None = None
    drop_path: float = 0.0
    checkpointing: bool = False  # recompute activations in backward
    groups: int = 0
    grouped: int = 0

    def __post_init__(self) -> None:
        if bool(self.groups) != bool(self.grouped) or (self.groups and (self.shared or self.block.experts)):
            raise ValueError(f"groups {self.groups} of {self.grouped} blocks: need both, no shared blocks, no experts")
        if not 0 <= self.grouped <= self.layers:
            raise ValueError(f"grouped: must be 0 to {self.layers}, the number of layers (got {self.grouped})")


class Branch(nn.Module):
    """Residual branch with norms, layer scale and drop path: x + f(norm(x)) or norm(x + f(x))."""

    def __init__(self, config: BlockConfig, drop_path: float):
        super().__init__()
        width = config.attention.width
        norm = partial(make_norm, config.norm, width, config.norm_eps)
        self.norm = norm() if config.pre_norm or config.post_norm else None
        self.out_norm = norm() if config.out_norm else None
        self.factor = config.residual_scale
        self.scale = LayerScale(width) if config.layer_scale else None
        self.drop = nn.Sequential(nn.Dropout(config.dropout), DropPath(drop_path))
        self.post = config.post_norm

    def forward(
        self, x: Float[Tensor, "B T D"], function: Callable[[Tensor], Tensor], onto: Tensor | None = None
    ) -> Float[Tensor, "B T D"]:
        """`onto`: what the branch is added to; None: `x`."""
        branch = function(self.normed(x))
        if self.out_norm is not None:
            branch = self.out_norm(branch.to(self.out_norm.weight.dtype))
        branch = branch if self.factor == 1 else branch * self.factor
        branch = branch if self.scale is None else self.scale(branch)
        x = (x if onto is None else onto) + (self.drop(branch) if self.training or self.drop[0].training else branch)
        return self.norm(x) if self.post else x

    def normed(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Input of the function."""
        return x if self.post or self.norm is None else self.norm(x)


class Block(nn.Module):
    """Self-attention, optional cross-attention and a feed-forward, each in a residual branch."""

    def __init__(self, config: BlockConfig, drop_path: float = 0.0, groups: int = 0):
        super().__init__()
        self.attention = (LinearAttention if config.attention.linear else Attention)(config.attention)
        self.attention_branch = Branch(replace(config, pre_norm=config.pre_norm and config.own_norm), drop_path)
        bias = config.attention.bias if config.feed_bias is None else config.feed_bias
        feed = config.attention.width, config.hidden, config.activation, config.gated, bias, config.dropout
        apart = config.cross is not None and config.cross_block
        self.own_feed = FeedForward(*feed) if apart else None
        self.own_feed_branch = Branch(config, drop_path) if apart else None
        self.cross = Attention(config.cross) if config.cross else None
        self.cross_branch = Branch(config, drop_path) if config.cross else None
        source_width = config.cross.source_width or config.cross.width if apart else 0
        self.source_norm = make_norm(config.norm, source_width, config.norm_eps) if apart else None
        if groups:
            self.feed = GroupedFeed(groups, *feed)
        elif config.experts is not None:
            self.feed = Experts(config.experts, *feed)
        else:
            self.feed = FeedForward(*feed, inner_norm=config.norm_eps if config.feed_norm else None)
        self.parallel = config.parallel
        self.feed_branch = Branch(replace(config, pre_norm=config.pre_norm and config.parallel != "one"), drop_path)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        source: Float[Tensor, "P S _"] | None = None,
        mask: Tensor | Causal | GatedBias | None = None,
        source_mask: Tensor | None = None,
        rotate: Callable | Disentangled | None = None,
        caches: tuple[LayerCache, LayerCache] | None = None,
        only: Int[Tensor, "B"] | None = None,
        group: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B _ D"]:
        """B may be a multiple of P: then B/P consecutive rows attend to each source. `mask`, `rotate`: of
        self-attention, see `Attention`; `caches`: of self- and cross-attention; `only`: see `Stack`; `group`: of each
        row, for a grouped feed-forward."""
        if only is not None:
            return self.forward_one(x, mask, only)
        own, crossed = caches or (None, None)
        start, x = x, self.attention_branch(x, lambda h: self.attention(h, mask=mask, rotate=rotate, cache=own))
        if self.parallel is not None:
            h = self.attention_branch.normed(start) if self.parallel == "one" else start
            return self.feed_branch(h, self.feed, onto=x)
        if self.own_feed is not None:
            x = self.own_feed_branch(x, self.own_feed)
        if self.cross is not None:
            known = crossed is not None and crossed.known
            if self.source_norm is not None and not known:
                source = self.source_norm(source)
            sources = (crossed.key if known else source).shape[0]

            def attend(h: Tensor) -> Tensor:  # rows of one source are several queries to it
                queries = h.reshape(sources, -1, h.shape[-1])
                return self.cross(queries, source, mask=source_mask, cache=crossed).reshape(h.shape)

            x = self.cross_branch(x, attend)
        return self.feed_branch(x, self.feed if group is None else partial(self.feed, group=group))

    def forward_one(self, x: Float[Tensor, "B T D"], mask: Tensor | None, only: Int[Tensor, "B"]) -> Tensor:
        """The output at one position of each row [B 1 D], without cross-attention, rotation or cache."""
        branch = self.attention_branch
        keys = branch.normed(x)
        if mask is not None and mask.shape[-2] > 1:  # [T S] or [B H T S]
            heads = mask.shape[1] if mask.ndim == 4 else 1
            mask = mask.expand(x.shape[0], heads, *mask.shape[-2:]).transpose(1, 2)
            mask = select_positions(mask, only).transpose(1, 2)
        x = branch(select_positions(x, only), lambda h: self.attention(h, keys, mask=mask))
        return self.feed_branch(x, self.feed)


def select_positions(x: Float[Tensor, "B T *D"] | Bool[Tensor, "B T *D"], only: Int[Tensor, "B"]) -> Tensor:
    """One position of each row: [B 1 *D]."""
    return x[torch.arange(x.shape[0], device=x.device), only][:, None]


class Stack(nn.Module):
    """A sequence of blocks. `valid` zeroes padded positions at the input, since NaN leaks through a mask."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config, self.checkpointing = config, config.checkpointing
        count = config.shared or config.layers
        rates = [config.drop_path * i / max(count - 1, 1) for i in range(count)]
        self.first_grouped = count - config.grouped
        self.blocks = nn.ModuleList(
            Block(_block(config, i), rate, config.groups if i >= self.first_grouped else 0)
            for i, rate in enumerate(rates)
        )
        block = config.block
        self.norm = make_norm(block.norm, block.attention.width, block.norm_eps) if config.final_norm else None

    @property
    def last(self) -> Block:
        return self.blocks[(self.config.layers - 1) % len(self.blocks)]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        source: Float[Tensor, "P S _"] | None = None,
        mask: Tensor | Causal | GatedBias | None = None,
        source_mask: Tensor | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
        rotate: Callable | Disentangled | None = None,
        cache: Cache | None = None,
        states: list[Tensor] | None = None,
        only: Int[Tensor, "B"] | None = None,
        layers: int | None = None,
        group: Int[Tensor, "B"] | None = None,
        pattern: tuple[frozenset[int], Tensor | Causal | None, Callable | None] | None = None,
        biases: Sequence[Tensor] | None = None,
    ) -> Float[Tensor, "B _ D"]:
        """`states` receives the input of each block and then the output after the final norm. `only`: return one
        position of each row [B 1 D]; without gradients, source, rotation, cache, `states`, hooks and capture the last
        block uses the others as keys alone, which saves most of its work. `layers`: run so many blocks and no final
        norm. `group`: of each row, for grouped blocks. `pattern`: numbers of layers with a mask and rotation of their
        own, and these. `biases`: a float mask [H T T] for each layer, beside the mask."""
        if valid is not None:
            x = torch.where(valid[..., None], x, 0)
        others = (
            only is None or capturing() or torch.is_grad_enabled() or self.config.block.parallel is not None
            or any(p is not None for p in (source, rotate, cache, states, layers, group, pattern, biases))
            or has_hooks(self.last)  # they see all positions, as with gradients
        )  # fmt: skip
        alone = None if others else only
        for layer in range(self.config.layers if layers is None else layers):
            if states is not None:
                states.append(x)
            block = self.blocks[layer % len(self.blocks)]
            caches = (cache.self_attention[layer], cache.cross_attention[layer]) if cache else None
            seen, turn = pattern[1:] if pattern is not None and layer in pattern[0] else (mask, rotate)
            seen = seen if biases is None else merge(seen, biases[layer])
            inputs = (x, source, seen, source_mask, turn, caches)
            if layer >= self.first_grouped and group is not None:
                inputs = (*inputs, None, group)
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, *inputs, use_reentrant=False, context_fn=recompute_contexts)
            elif alone is not None and layer == self.config.layers - 1:
                x = block(x, mask=mask, only=alone)
            else:
                x = block(*inputs)
        if only is not None and alone is None:
            x = select_positions(x, only)
        x = x if self.norm is None or layers is not None else self.norm(x)
        if states is not None:
            states.append(x)
        return x


def _block(stack: StackConfig, number: int) -> BlockConfig:
    """The block's own configuration, without experts, or without a first norm, where it has none."""
    config = stack.block
    every = 1 if config.experts is None else config.experts.every
    config = config if number % every == 1 % every else replace(config, experts=None)
    return config if number or stack.first_norm else replace(config, own_norm=False)


def transformer(
    width: int, layers: int, heads: int, hidden: int, *, activation: str = "gelu", norm_eps: float = 1e-5,
    source_width: int | None = None, key_bias: bool = True, layer_scale: bool = False, dropout: float = 0.0,
    drop_path: float = 0.0, final_norm: bool = True, checkpointing: bool = False,
) -> StackConfig:  # fmt: skip
    """Pre-norm LayerNorm blocks of multi-head attention, with cross-attention if `source_width` is given."""
    own = AttentionConfig(width, heads, key_bias=key_bias)
    cross = AttentionConfig(width, heads, key_bias=key_bias, source_width=source_width) if source_width else None
    block = BlockConfig(own, hidden, activation, norm_eps=norm_eps, cross=cross, layer_scale=layer_scale,
                        dropout=dropout)  # fmt: skip
    return StackConfig(block, layers, final_norm, drop_path=drop_path, checkpointing=checkpointing)
