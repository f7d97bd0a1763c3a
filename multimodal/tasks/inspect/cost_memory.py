"""Bytes that training and generation need.

Activations are what PyTorch's autograd keeps for the backward pass without compilation, on a CPU: attention by the
fused kernel, which keeps queries, keys, values, its result and a number a row; but where each head has a bias of its
own (T5, ALiBi, relative terms), or attention has dropout, also all its weights in float32. A GPU's kernels keep about
as much (its RMSNorm one state less)."""

from typing import NamedTuple

from torch import nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.blocks.stack import BlockConfig
from multimodal.models.text import TextTransformer
from multimodal.tasks.inspect.cost_towers import Tower

ACTIVATED = {"gelu": 1, "gelu_tanh": 1, "silu": 1, "quick_gelu": 2, "relu": 0, "tanh": 0}  # kept beside the result
FULL, HALF = 4, 2  # bytes


class Work(NamedTuple):
    """`batch` items with linear maps on numbers of so many bytes, and norms on numbers of `stream` bytes: under
    autocast these stay float32 where the stack's input is."""

    batch: int
    bytes: int
    stream: int = FULL

    def inputs(self, readers: int) -> int:
        """Bytes of each number that so many linear maps read: where it is of another type, each has a copy."""
        return self.bytes if self.bytes == self.stream else readers * self.bytes

    def norm(self, kind: str, numbers: int, positions: int) -> int:
        """The norm's input, with mean and deviation; RMS norm keeps also what it has divided."""
        return self.stream * (numbers + 2 * positions if kind == "layer" else 2 * numbers + positions)


def cache_bytes(tower: Tower, batch: int, size: int) -> int:
    """Of the keys and values of a text with all its positions, and of its source."""
    block, layers = tower.body.config.block, tower.body.config.layers
    held = tower.positions if tower.window is None else min(tower.positions, tower.window)
    crossed = tower.source * _keys(block.cross) if block.cross else 0
    return 2 * layers * batch * size * (held * _keys(block.attention) + crossed)


def state_bytes(model: nn.Module, optimizer: str) -> int:
    """What `train.optim.optimizers` keeps once it has made a step: two moments of each number (AdamW), or one of the
    matrices in blocks (Muon), and of each tensor of AdamW's the count of its steps."""
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            muon = optimizer == "muon" and parameter.ndim == 2 and ".blocks." in f".{name}"
            total += FULL * (parameter.numel() if muon else 2 * parameter.numel() + 1)
    return total


def cast_bytes(model: nn.Module) -> int:
    """Of the weights' copies in bfloat16 that autocast keeps for the backward pass."""
    maps = [part.weight for part in model.modules() if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d)]
    tied = [part.embed.weight for part in model.modules() if isinstance(part, TextTransformer) and part.config.tied]
    return HALF * sum(weight.numel() for weight in maps + tied if weight.requires_grad)


def activation_bytes(tower: Tower, work: Work) -> int:
    """Of a batch of items."""
    body, config = tower.body, tower.body.config
    work = work._replace(stream=work.bytes) if tower.narrow_stem else work
    numbers = tower.positions * config.block.attention.width
    block = _conformer_block if isinstance(config.block, ConformerConfig) else _block
    of_block, shared = block(config.block, tower, work)
    each = work.batch * of_block + shared
    kept = config.layers * each
    if body.checkpointing:  # each block's input, and all of the one that is computed anew
        kept = config.layers * work.batch * numbers * work.stream + each
    if getattr(config, "final_norm", False):
        kept += work.batch * work.norm(config.block.norm, numbers, tower.positions)
    return kept + work.batch * (tower.wide * FULL + tower.narrow * work.bytes)


def _block(block: BlockConfig, tower: Tower, work: Work) -> tuple[int, int]:
    """For each item, and for all together."""
    count, width = tower.positions, block.attention.width
    norm, b = work.norm(block.norm, count * width, count), work.bytes
    feed = norm + count * width * work.inputs(1 + block.gated)
    feed += count * block.hidden * b * (1 + ACTIVATED[block.activation] + 2 * block.gated)
    feed += count * block.hidden * b * (block.dropout > 0)
    own, shared = _attention(block.attention, count, count, tower, work)
    total, branches = feed + norm + count * width * work.inputs(3) + own, 2
    if block.cross is not None:
        total += norm + count * width * work.inputs(1) + _attention(block.cross, count, tower.source, None, work)[0]
        source = tower.source * (block.cross.source_width or block.cross.width)
        total += source * (work.inputs(2) if block.cross_block or b != FULL else 0)  # else the one of the encoder
        total += work.norm(block.norm, source, tower.source) + feed if block.cross_block else 0
        branches += 1 + block.cross_block
    beside = (block.dropout > 0) + block.layer_scale
    return total + branches * count * width * b * beside, shared


def _conformer_block(block: ConformerConfig, tower: Tower, work: Work) -> tuple[int, int]:
    count, width = tower.positions, block.attention.width
    norm, b = work.norm("layer", count * width, count), work.bytes
    drop = block.dropout > 0
    feed = norm + count * width * work.inputs(1) + count * block.hidden * b * (2 + drop)
    own, shared = _attention(block.attention, count, count, tower, work)
    # to the gate twice the width, then to the depthwise map, the norm, the activation and the last map
    convolution = norm + count * width * (work.inputs(1) + 6 * b)
    total = 2 * feed + norm + count * width * work.inputs(3) + own + convolution + norm
    return total + 4 * count * width * b * drop, shared


def _attention(a: AttentionConfig, queries: int, keys: int, tower: Tower | None, work: Work) -> tuple[int, int]:
    """Between its linear maps: for each item, and for all together. `tower`: whose own attention it is; None: it looks
    at a source."""
    head = a.head_width or a.width // a.heads
    inner, mask = queries * a.heads * head, tower.mask if tower else "none"
    result = inner * work.bytes * (1 + (tower is not None and tower.turned))  # of another layout, thus copied
    if a.linear:  # the features of queries and keys, and what they were made from
        return result + (2 * inner + 3 * keys * a.heads * head) * FULL, 0
    if mask != "heads" and not (a.relative or a.shaw or a.dropout):
        kept = inner * work.bytes + 2 * keys * _keys(a) * work.bytes + queries * a.heads * FULL
        return kept + result, queries * keys * work.bytes * (mask == "shared")
    copies = 3 if a.dropout else 1  # the weights; what is dropped of them, and the rest
    kept = result + (inner + 2 * keys * a.heads * head) * FULL + a.heads * queries * keys * FULL * copies
    distances = queries + keys - 1 if a.relative else 2 * a.shaw + 1 if a.shaw else 0
    if distances:  # the query that meets them, and how
        kept += inner * work.bytes + a.heads * queries * distances * work.bytes
    shared = queries * keys * 8 * (distances > 0)  # which distance each pair has
    return kept, shared + distances * 2 * a.width * work.bytes * a.relative


def _keys(a: AttentionConfig) -> int:
    """Numbers of a position's key."""
    return (a.kv_heads or a.heads) * (a.head_width or a.width // a.heads)
