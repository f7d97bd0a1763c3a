"""Decoder blocks on a CPU with a fast path for single-token steps."""

from collections.abc import Callable
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import QKV, Attention
from multimodal.blocks.cache import LayerCache
from multimodal.blocks.capture import capturing
from multimodal.blocks.experts import Experts, GroupedFeed
from multimodal.blocks.layers import FeedForward, PlusRMSNorm
from multimodal.blocks.stack import Block
from multimodal.inference.modules import Replacement


class FusedAttention(Replacement, Attention):
    """Self-attention with one map, `qkv`, for query, key and value."""

    def __init__(self, attention: Attention):
        super().__init__(attention)
        maps = [self.query, self.key, self.value]
        del self.query, self.key, self.value
        biased = any(x.bias is not None for x in maps)
        self.qkv = nn.Linear(maps[0].in_features, sum(x.out_features for x in maps), bias=biased, device="meta")
        self.qkv.weight = nn.Parameter(torch.cat([x.weight for x in maps]), requires_grad=False)
        if biased:
            biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in maps]
            self.qkv.bias = nn.Parameter(torch.cat(biases), requires_grad=False)

    def project(self, x: Tensor, source: Tensor | None, rotate: Callable | None, cache: LayerCache | None) -> QKV:
        query, key, value = self.turned(self.split(self.qkv(x)), rotate)
        return query, *((key, value) if cache is None else cache.append(key, value))

    def turned(self, heads: Float[Tensor, "B _ T E"], rotate: Callable | None) -> QKV:
        """Query, key and value of all heads, normed and rotated."""
        both, value = torch.split_with_sizes(heads, (self.heads + self.kv_heads, self.kv_heads), 1)
        if self.query_norm is not None:
            query, key = both.split((self.heads, self.kv_heads), 1)
            dtype = self.query_norm.weight.dtype
            normed = [self.query_norm(query.to(dtype)), self.key_norm(key.to(dtype))]
            both = torch.cat(normed, 1).to(heads.dtype)
        query, key = (both if rotate is None else rotate(both)).split((self.heads, self.kv_heads), 1)
        return query, key, value


def can_join(attention: nn.Module, dtype: torch.dtype | None = None) -> bool:
    """Return True for attention, of this type, whose query, key and value may become one map."""
    if type(attention) is not Attention or type(attention.query) is not nn.Linear or attention.config.qk_norm_whole:
        return False
    return dtype is None or attention.query.weight.dtype == dtype


def _attend(
    query: Float[Tensor, "B K G E"], key: Float[Tensor, "B K S E"], value: Float[Tensor, "B K S E"],
    mask: Bool[Tensor, "_ 1 1 S"] | Bool[Tensor, "1 S"] | Float[Tensor, "*B H 1 S"] | None, scale: float,
) -> Float[Tensor, "B K G E"]:  # fmt: skip
    """Attention of one new position, G queries to a key. Left padding is cut off, so that a row has the bits that it
    has alone: masked, the sums would be taken in another order."""
    if mask is None or mask.dtype != torch.bool:
        mask = None if mask is None else mask.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    seen = mask.reshape(-1, mask.shape[-1])
    firsts, parts, row = seen.int().argmax(-1), [], 0
    if not (seen.sum(-1) + firsts == seen.shape[1]).all():  # gaps after the first visible key
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    for first, same in groupby(firsts.expand(len(query)).tolist()):
        rows = slice(row, row := row + len(list(same)))
        own = key[rows, :, first:], value[rows, :, first:]
        parts.append(F.scaled_dot_product_attention(query[rows], *own, scale=scale))
    return torch.cat(parts)


def _supports(mask: Tensor | None, attention: Attention) -> bool:
    """Return True for masks over keys alone, and for float masks if each head has a key."""
    if not isinstance(mask, Tensor):
        return mask is None
    if mask.dtype != torch.bool:
        return attention.heads == attention.kv_heads
    return mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1)


class _Functions(NamedTuple):
    """The parts of a step without `nn.Module.__call__`, which takes a tenth of a small model's time."""

    norms: list[Callable[[Tensor], Tensor]]
    qkv: Callable
    out: Callable
    feed: Callable
    query: Callable | None
    cross_out: Callable | None


class FusedBlock(Replacement, Block):
    """A Block with a fast path for single-token decoding."""

    def __init__(self, block: Block):
        super().__init__(block)
        self.attention = FusedAttention(block.attention)

    def forward(
        self, x: Float[Tensor, "B T D"], source: Float[Tensor, "P S _"] | None = None, mask: Tensor | None = None,
        source_mask: Tensor | None = None, rotate: Callable | None = None,
        caches: tuple[LayerCache, LayerCache] | None = None, only: Int[Tensor, "B"] | None = None,
    ) -> Float[Tensor, "B _ D"]:  # fmt: skip
        plain = x.shape[1] > 1 or source_mask is not None or not _supports(mask, self.attention) or capturing()
        if plain or caches is None or (self.cross is not None and not caches[1].known):
            return super().forward(x, source, mask, source_mask, rotate, caches, only)
        own, parts, rows = self.attention, self.functions, x.shape[0]
        heads = parts.qkv(parts.norms[0](x)).view(rows, -1, 1, own.head_width)
        query, key, value = own.turned(heads, rotate)
        key, value = caches[0].append(key, value)
        # heads that share a key are several queries to it
        mixed = _attend(query.reshape(rows, own.kv_heads, -1, own.head_width), key, value, mask, own.scale)
        x = x + parts.out(mixed.reshape(rows, 1, -1))
        if self.cross is not None:
            x = x + self._cross_attend(parts.norms[1](x), caches[1])
        return x + parts.feed(parts.norms[-1](x))

    def _cross_attend(self, x: Float[Tensor, "B 1 D"], cache: LayerCache) -> Float[Tensor, "B 1 D"]:
        """Rows of one source are several queries to it. PyTorch's attention takes a fifth longer than two products."""
        key, value, parts = cache.key, cache.value, self.functions
        query = parts.query(x).view(len(key), -1, key.shape[1], key.shape[3]).transpose(1, 2)
        scores = torch.baddbmm(
            x.new_empty(()), query.flatten(0, 1), key.flatten(0, 1).mT, beta=0, alpha=self.cross.scale
        )
        mixed = torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view_as(query)
        return parts.cross_out(mixed.transpose(1, 2).reshape(len(x), 1, -1))

    @cached_property
    def functions(self) -> _Functions:  # on first use, when the maps have been packed
        branches = self.attention_branch, self.cross_branch, self.feed_branch
        cross = (None, None) if self.cross is None else (self.cross.query.forward, self.cross.out.forward)
        return _Functions(
            [_norm(branch.norm) for branch in branches if branch is not None],
            self.attention.qkv.forward, self.attention.out.forward, _feed(self.feed), *cross,
        )  # fmt: skip


def _norm(norm: nn.LayerNorm | nn.RMSNorm) -> Callable[[Tensor], Tensor]:
    shape, weight, eps = norm.normalized_shape, norm.weight, norm.eps
    if isinstance(norm, nn.RMSNorm):
        return _rms_norm(weight, eps)
    bias = norm.bias
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _rms_norm(weight: Float[Tensor, "D"], eps: float | None) -> Callable[[Tensor], Tensor]:
    """x / √(|x|²/D + eps) · weight in four calls; PyTorch's own takes a dozen on a CPU."""
    width, dtype = len(weight), weight.dtype
    eps = torch.finfo(dtype).eps if eps is None else eps
    least, gain = torch.tensor((eps * width) ** 0.5, dtype=torch.float32), weight.float() * width**0.5

    def normed(x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        size = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        return x.div(size.hypot_(least)).mul_(gain).to(dtype)

    return normed


def _feed(feed: FeedForward | Experts) -> Callable[[Tensor], Tensor]:
    if isinstance(feed, Experts) or feed.gate is not None:
        return feed.forward
    up, down, activation = feed.up.forward, feed.down.forward, feed.activation
    if isinstance(activation, nn.Identity):  # `up` applies the activation
        return lambda x: down(up(x))
    return lambda x: down(activation(up(x)))


def plain_norm(part: nn.Module) -> nn.Module:
    """An RMS norm with the gain 1 + weight of a `PlusRMSNorm` in float32; another module itself."""
    if not isinstance(part, PlusRMSNorm) or part.weight.dtype != torch.float32:
        return part
    made = nn.RMSNorm(part.normalized_shape, part.eps, device="meta")
    made.weight = nn.Parameter(part.weight.detach() + 1, requires_grad=False)
    return made


def can_fuse(block: Block) -> bool:
    """Return True for pre-norm blocks without relative terms whose cross-attention has a key for each head."""
    branches = [one for one in (block.attention_branch, block.cross_branch, block.feed_branch) if one is not None]
    attentions = [block.attention] if block.cross is None else [block.attention, block.cross]
    return not (
        block.own_feed is not None
        or block.parallel is not None
        or isinstance(block.feed, GroupedFeed)
        or any(one.post or one.scale is not None or one.out_norm is not None or one.factor != 1 for one in branches)
        or any(type(one.norm) not in (nn.LayerNorm, nn.RMSNorm) for one in branches)
        or any(type(one) is not Attention or one.relative is not None for one in attentions)
        or any(one.config.qk_norm_whole or one.config.softcap is not None for one in attentions)
        or (block.cross is not None and block.cross.heads != block.cross.kv_heads)
    )
