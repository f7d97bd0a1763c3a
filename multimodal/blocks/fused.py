"""A decoder's blocks on a CPU, for inference: one position after others in as few calls as it takes."""

from collections.abc import Callable
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from multimodal.blocks.attention import QKV, Attention
from multimodal.blocks.cache import LayerCache
from multimodal.blocks.capture import capturing
from multimodal.blocks.layers import FeedForward
from multimodal.blocks.stack import Block


class FusedAttention(Attention):
    """Self-attention with one map, `qkv`, to query, key and value."""

    qkv: nn.Module

    def project(self, x: Tensor, source: Tensor | None, rotate: Callable | None, cache: LayerCache | None) -> QKV:
        query, key, value = self.split(self.qkv(x)).split(self.heads, 1)
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        return query, *((key, value) if cache is None else cache.append(key, value))


def _mixed(
    query: Float[Tensor, "B H 1 E"], key: Float[Tensor, "B H S E"], value: Float[Tensor, "B H S E"],
    mask: Bool[Tensor, "B 1 1 S"] | None, scale: float,
) -> Float[Tensor, "B H 1 E"]:  # fmt: skip
    """Attention of one new position. A row without its padding has the bits that it has alone: with it the sums would
    be taken in another order."""
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    firsts, parts, row = mask[:, 0, 0].int().argmax(-1).tolist(), [], 0
    for first, same in groupby(firsts):
        rows = slice(row, row := row + len(list(same)))
        own = key[rows, :, first:], value[rows, :, first:]
        parts.append(F.scaled_dot_product_attention(query[rows], *own, scale=scale))
    return torch.cat(parts)


class _Parts(NamedTuple):
    """What a step runs, past the modules: in a small model their calls take a tenth of its time."""

    norms: list[tuple]
    qkv: Callable
    out: Callable
    query: Callable
    cross_out: Callable
    feed: Callable
    scale: float
    cross_scale: float


class FusedBlock(Block):
    """A block that takes one new position of each row a shorter way, and all else as any block does."""

    def forward(
        self, x: Float[Tensor, "B T D"], source: Float[Tensor, "P S _"] | None = None, mask: Tensor | None = None,
        source_mask: Tensor | None = None, rotate: Callable | None = None,
        caches: tuple[LayerCache, LayerCache] | None = None,
    ) -> Float[Tensor, "B T D"]:  # fmt: skip
        plain = x.shape[1] > 1 or source_mask is not None or rotate is not None or capturing()
        if plain or caches is None or (key := caches[1].key) is None:
            return super().forward(x, source, mask, source_mask, rotate, caches)
        parts, heads = self.parts, key.shape[1]
        own, cross, feed = parts.norms
        mixed = parts.qkv(torch.layer_norm(x, *own)).view(len(x), 1, 3 * heads, -1).transpose(1, 2)
        query, *new = mixed.split(heads, 1)
        mixed = _mixed(query, *caches[0].append(*new), mask, parts.scale)
        x = x + parts.out(mixed.reshape(x.shape))
        # rows of one source are more queries to it. PyTorch's attention takes a fifth longer than the two products.
        query = parts.query(torch.layer_norm(x, *cross)).view(len(key), -1, heads, key.shape[3]).transpose(1, 2)
        scores = torch.baddbmm(
            x.new_empty(()), query.flatten(0, 1), key.flatten(0, 1).mT, beta=0, alpha=parts.cross_scale
        )
        mixed = torch.bmm(scores.softmax(-1), caches[1].value.flatten(0, 1)).view_as(query)
        x = x + parts.cross_out(mixed.transpose(1, 2).reshape(x.shape))
        return x + parts.feed(torch.layer_norm(x, *feed))

    @cached_property
    def parts(self) -> _Parts:
        norms = [branch.norm for branch in (self.attention_branch, self.cross_branch, self.feed_branch)]
        maps = self.attention.qkv, self.attention.out, self.cross.query, self.cross.out
        return _Parts(
            [(norm.normalized_shape, norm.weight, norm.bias, norm.eps) for norm in norms],
            *(one.forward for one in maps), _feed(self.feed), self.attention.scale, self.cross.scale,
        )  # fmt: skip


def _feed(feed: FeedForward) -> Callable[[Tensor], Tensor]:
    if not isinstance(feed.activation, nn.Identity):  # it is not within `up`
        return feed.forward
    up, down = feed.up.forward, feed.down.forward
    return lambda x: down(up(x))


def can_fuse(block: Block) -> bool:
    """Whether it is the block that `FusedBlock` has the way for: norms before, cross-attention, a key each head."""
    if block.cross is None or block.own_feed is not None:
        return False
    branches = block.attention_branch, block.cross_branch, block.feed_branch
    return not (
        any(branch.post or branch.scale is not None or type(branch.norm) is not nn.LayerNorm for branch in branches)
        or any(one.heads != one.kv_heads or one.relative is not None for one in (block.attention, block.cross))
        or block.attention.heads != block.cross.heads
    )


def fuse(block: Block) -> None:
    """Makes a block an inference one; its `attention.qkv` takes the place of three maps."""
    own = block.attention
    maps = [own.query, own.key, own.value]
    own.qkv = nn.Linear(own.query.in_features, 3 * own.query.out_features, bias=own.query.bias is not None)
    biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in maps]
    own.qkv.weight = nn.Parameter(torch.cat([x.weight for x in maps]), requires_grad=False)
    if own.qkv.bias is not None:
        own.qkv.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    del own.query, own.key, own.value
    own.__class__, block.__class__ = FusedAttention, FusedBlock
