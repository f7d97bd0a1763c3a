"""Largest difference from the reference library in this run, per family and output; tensors that no output shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

TABLE: dict[tuple[str, str], float] = {}


def record(family: str, output: str, difference: float) -> None:
    """Keep the largest difference."""
    TABLE[family, output] = max(difference, TABLE.get((family, output), 0.0))


def idle(model: nn.Module, run: Callable[[], Tensor]) -> list[str]:
    """Names of the parameters on which the output of `run` does not depend: a comparison would not notice wrong ones.

    One gradient tells them all."""
    import torch

    model.requires_grad_(True)
    with torch.enable_grad():
        output = run()
        random = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        names, tensors = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad((output * random).sum(), tensors, allow_unused=True)
    model.requires_grad_(False)
    return [name for name, own in zip(names, gradients, strict=True) if own is None or not own.norm() > 1e-4]
