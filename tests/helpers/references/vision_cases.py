"""Cases of the vision parity tests."""

import torch
from torch import Tensor, nn

from tests.helpers.references.vision import case


def random_images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))


def load(name: str, tensors: dict[str, Tensor] | None = None) -> nn.Module:
    made = case(name)
    return made.family.load(made.tensors if tensors is None else tensors, made.config, "file").model
