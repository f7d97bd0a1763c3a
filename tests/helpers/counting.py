"""Parameters of a configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def undrawn() -> Iterator[None]:
    """Make modules of other libraries on the meta device, without drawing weights, which takes longer than the rest."""
    draws = {name: lambda tensor, *_, **__: tensor for name in vars(nn.init) if name.endswith("_") and name[0] != "_"}
    with torch.device("meta"), mock.patch.multiple(nn.init, **draws):
        yield
