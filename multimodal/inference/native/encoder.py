"""Towers' linear maps and norms through the compiled library."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.blocks.conformer import ConformerBlock
from multimodal.blocks.layers import FeedForward
from multimodal.blocks.positions import RelativeTerm
from multimodal.blocks.stack import Block, Stack
from multimodal.inference.fused_decoder import FusedAttention, FusedBlock, can_join
from multimodal.inference.native.library import library
from multimodal.inference.native.linear import ACTIVATIONS, NativeLinear, NativeNorm
from multimodal.inference.packed import PackedLinear
from multimodal.inference.tune import Way, choose, compiled_by_default, quickest

ROWS, INPUTS, OUTPUTS = 256, 512, 1536  # of the map that is measured


def many_rows(kind: Way, dtype: torch.dtype) -> Callable[[], Callable[[], Tensor]]:
    """A maker of the product of many rows by a map of such a kind, which is measured."""

    def make() -> Callable[[], Tensor]:
        rows, weight = (torch.ones(count, INPUTS, dtype=torch.float32, device="cpu") for count in (ROWS, OUTPUTS))
        return partial(kind(weight.to(dtype)), rows.to(dtype))

    return make


def prefers_int8(dtype: torch.dtype) -> bool:
    """Return True if this CPU multiplies many rows quicker in 8-bit integers than in `dtype`; measured once. Never
    without the compiled library."""
    if library() is None:
        return False
    has = torch.cpu.get_capabilities()
    plain = not has.get("avx2", False) or (has.get("amx_bf16", False) and dtype == torch.bfloat16)
    works = {
        "int8": many_rows(partial(NativeLinear, int8=True), torch.float32),
        "float": many_rows(PackedLinear, dtype),
    }
    return quickest(f"many rows, int8 or {dtype}", works, "float" if plain else "int8") == "int8"


def prefers_native() -> bool:
    """Return True where compiled maps are the quickest exact ones for many rows in floats; measured once. With AVX2
    alone oneDNN's give a row other bits in company."""
    if library() is None:
        return False
    usual = "native" if compiled_by_default() else "packed"
    return choose(OUTPUTS, INPUTS, {"packed": PackedLinear, "native": NativeLinear}, usual, (ROWS,)) == "native"


def in_native(tower: nn.Module, int8: bool, join: bool) -> None:
    """Replace the norms and the linear maps of the tower's blocks, those in 8-bit integers or in floats. `join`: query,
    key and value become one, but not in a stack's last block, of which some towers need one position alone."""
    lasts = {stack.last for stack in tower.modules() if isinstance(stack, Stack) and len(stack.blocks)}
    for block in [part for part in tower.modules() if isinstance(part, Block | ConformerBlock)]:
        if join and can_join(block.attention) and block not in lasts:
            block.attention = FusedAttention(block.attention)
        normed = not isinstance(block, FusedBlock)  # whose steps read its norms
        for part in list(block.modules()):
            if isinstance(part, FeedForward) and type(part.up) is nn.Linear and part.activation in ACTIVATIONS:
                name = "up" if part.gate is None else "gate"
                setattr(part, name, _made(getattr(part, name), int8, part.activation))
                part.activation = nn.Identity()
            for name, child in part.named_children():
                # a relative term reads its map's type
                if type(child) is nn.Linear and not isinstance(part, RelativeTerm):
                    setattr(part, name, _made(child, int8))
                elif type(child) is nn.LayerNorm and not isinstance(part, Attention) and normed:
                    setattr(part, name, NativeNorm(child))


def _made(linear: nn.Linear, int8: bool, activation: Callable[[Tensor], Tensor] | None = None) -> NativeLinear:
    return NativeLinear(linear.weight, linear.bias, int8, activation)
