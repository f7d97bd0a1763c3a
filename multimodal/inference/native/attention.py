"""Attention of many queries through the compiled library."""

import ctypes
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.inference.native.library import NUMBER, AttentionRecord, library
from multimodal.inference.tune import compiled_by_default, quickest

SHAPE = (12, 197, 64)  # that is measured: heads, positions and width


def native_attention(
    query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K S E"], value: Float[Tensor, "B K S E"],
    attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Float[Tensor, "B H T E"]:  # fmt: skip
    """As `F.scaled_dot_product_attention`, which it calls for a single query, dropout, gradients and other types than
    float32. A query has the same bits alone and among others, on any number of threads."""
    (batch, heads, count, width), (_, kv_heads, keys, _) = query.shape, key.shape
    alike = value.shape == key.shape == (batch, kv_heads, keys, width)
    if dropout_p or count == 1 or not keys or not alike or not _plain(query, key, value, attn_mask):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    mixed = query.new_empty(batch, count, heads, width)
    parts = [one.detach() if one.stride(3) == 1 else one.detach().contiguous() for one in (query, key, value)]
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, count, keys)
    steps = (0, 0, 0, 0) if mask is None else mask.stride()
    record = AttentionRecord(
        *(one.data_ptr() for one in parts), 0 if mask is None else mask.data_ptr(), mixed.data_ptr(),
        *((NUMBER * 3)(*one.stride()[:3]) for one in parts), (NUMBER * 4)(*steps), batch, heads, kv_heads, count, keys,
        width, mask is not None and mask.dtype == torch.bool, is_causal, width**-0.5 if scale is None else scale,
    )  # fmt: skip
    library().attention(ctypes.addressof(record), torch.get_num_threads())
    return mixed.transpose(1, 2)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True for float32 on a CPU without gradients."""
    tensors = [query, key, value] if mask is None or mask.dtype == torch.bool else [query, key, value, mask]
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return False
    return all(one.dtype == torch.float32 and one.is_cpu for one in tensors)


def prefers_native_attention() -> bool:
    """Return True where compiled attention is quicker than PyTorch's in float32; measured once."""
    if library() is None:
        return False

    def work(way: Callable[..., Tensor]) -> Callable[[], Tensor]:
        heads, count, width = SHAPE
        x = torch.ones(1, count, 3, heads, width, dtype=torch.float32, device="cpu").permute(2, 0, 3, 1, 4)
        return partial(way, *x)

    works = {"torch": partial(work, F.scaled_dot_product_attention), "native": partial(work, native_attention)}
    return quickest("attention of many queries", works, "native" if compiled_by_default() else "torch") == "native"


def attend_natively(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, Attention):
            part.kernel = native_attention
