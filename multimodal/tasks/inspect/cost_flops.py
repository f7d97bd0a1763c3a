"""Floating-point operations of a forward pass: of products of matrices and of convolutions, a product and a sum as two.

Attention is counted as it is computed, over all queries and keys: a causal mask or a window saves none of it here."""

from torch import nn

from multimodal.blocks.attention import Attention
from multimodal.blocks.conformer import ConformerBlock
from multimodal.blocks.linear_attention import CHUNK, LinearAttention
from multimodal.blocks.positions import RelativeTerm, ShawTerm
from multimodal.blocks.stack import Block
from multimodal.tasks.inspect.cost_towers import Tower, linear_flops


def tower_flops(tower: Tower) -> tuple[int, int]:
    """Of one item: in all, and of these between queries and keys, and weights and values."""
    body, total, between = tower.body, tower.flops, 0
    layers = body.config.layers
    for layer in range(layers):
        block = body.blocks[layer % len(body.blocks)]
        of = _conformer_block if isinstance(block, ConformerBlock) else _block
        own, crossing = of(block, tower.positions, tower.source)
        total, between = total + own + crossing, between + crossing
    return total, between


def _block(block: Block, positions: int, source: int) -> tuple[int, int]:
    maps = linear_flops(block.feed, positions) + linear_flops(block.own_feed, positions)
    own, between = _attention(block.attention, positions, positions)
    if block.cross is not None:
        crossed, over = _attention(block.cross, positions, source)
        own, between = own + crossed, between + over
    return maps + own, between


def _conformer_block(block: ConformerBlock, positions: int, _: int) -> tuple[int, int]:
    feeds: list[nn.Module] = [block.feed_before, block.feed_after, block.convolution]
    maps = sum(linear_flops(part, positions) for part in feeds)
    maps += 2 * positions * block.convolution.depthwise.weight.numel()
    own, between = _attention(block.attention, positions, positions)
    return maps + own, between


def _attention(module: Attention, queries: int, keys: int) -> tuple[int, int]:
    maps = linear_flops(module.query, queries) + linear_flops(module.out, queries)
    maps += linear_flops(module.key, keys) + linear_flops(module.value, keys)
    inner = module.heads * module.head_width
    if isinstance(module, LinearAttention):
        return maps, _linear(module, queries, keys)
    between = 4 * queries * keys * inner
    term = module.relative
    if isinstance(term, RelativeTerm):
        distances = queries + keys - 1
        maps += linear_flops(term.project, distances)
        between += 2 * queries * distances * inner
    elif isinstance(term, ShawTerm):
        between += 2 * queries * term.table.weight.shape[0] * inner
    return maps, between


def _linear(module: LinearAttention, queries: int, keys: int) -> int:
    """Sums over keys into a matrix of a head's width, and queries that read it and its sum; causal ones also over the
    chunk that they are in."""
    inner, head = module.heads * module.head_width, module.head_width
    between = 2 * (keys + queries) * inner * head + 2 * queries * inner
    if module.config.linear == "causal":
        chunks = [CHUNK] * (queries // CHUNK) + [queries % CHUNK]
        between += sum(4 * chunk * chunk * inner for chunk in chunks)
    return between
