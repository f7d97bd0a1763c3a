"""Parameters of a configuration."""

from torch import nn


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
