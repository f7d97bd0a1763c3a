"""Attention masks: bool, True may attend; they combine with `&`. A float bias joins by `merge`."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def causal(queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Each query sees itself and what came before; the last query is aligned with the last key (KV cache)."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def window(
    queries: int, keys: int, before: int, after: int = 0, device: torch.device | None = None
) -> Bool[Tensor, "T S"]:
    """Each query sees `before` positions to its left and `after` to its right (Longformer, Mistral)."""
    distance = _distance(queries, keys, device)
    return (distance <= before) & (distance >= -after)


def prefix(queries: int, keys: int, length: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Causal, except that the first `length` keys are seen by all (prefix LM, T5 paper figure 4)."""
    seen = causal(queries, keys, device)
    seen[:, :length] = True
    return seen


def padding(lengths: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B S"]:
    """True for the first `lengths[b]` of `size` positions."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def over_keys(valid: Bool[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """A padding mask in the shape that attention broadcasts."""
    return valid[:, None, None, :]


def blocks(queries: int, keys: int, block: int, device: torch.device | None = None) -> Bool[Tensor, "T S"]:
    """Each query sees its own block and all earlier ones (chunked streaming attention)."""
    start = keys - queries
    rows = (torch.arange(queries, device=device) + start) // block
    return rows[:, None] >= torch.arange(keys, device=device)[None, :] // block


def documents(ids: Int[Tensor, "B S"]) -> Bool[Tensor, "B 1 S S"]:
    """Positions see only their own document in a packed row."""
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def merge(
    mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None, bias: Float[Tensor, "..."] | None
) -> Bool[Tensor, "..."] | Float[Tensor, "..."] | None:
    """A bool or float mask and a float bias as one mask for scaled_dot_product_attention."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, -torch.inf)
    return mask + bias


def _distance(queries: int, keys: int, device: torch.device | None) -> Int[Tensor, "T S"]:
    """Query position minus key position, the last of each aligned."""
    rows = torch.arange(keys - queries, keys, device=device)
    return rows[:, None] - torch.arange(keys, device=device)[None, :]
