"""Capture of attention weights. Outputs keep their bits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

# by thread; torch.compile guards the length of a global dict, but not a `threading.local`
_captured: dict[int, list[tuple[nn.Module, Tensor]]] = {}


@contextmanager
def capture_attention() -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Collect (module, weights [B H T S]) of every attention that this thread runs inside."""
    thread = threading.get_ident()
    before, _captured[thread] = _captured.pop(thread, None), []
    try:
        yield _captured[thread]
    finally:
        del _captured[thread]
        if before is not None:
            _captured[thread] = before


def capturing() -> bool:
    """True inside `capture_attention`, in its thread; while compiling, in any."""
    return len(_captured) > 0 and (torch.compiler.is_compiling() or threading.get_ident() in _captured)


def capture(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, scale: float, softcap: float | None = None
) -> None:
    """Collect the weights of one attention."""
    thread = next(reversed(_captured)) if torch.compiler.is_compiling() else threading.get_ident()
    _captured[thread].append((module, attention_weights(query, key, mask, scale, softcap).detach()))


def attention_weights(
    query: Float[Tensor, "B H T E"], key: Float[Tensor, "B K S E"], mask: Tensor | None, scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "B H T S"]:  # fmt: skip
    """softmax(QKᵀ·scale + mask), zero in rows that may attend to nothing. `softcap` c: scores s become c·tanh(s/c)."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)
