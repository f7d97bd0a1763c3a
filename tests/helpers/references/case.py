"""A tiny random model of a reference library, with what its checkpoint holds."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from multimodal.weights.family import Family


@dataclass(frozen=True)
class Case:
    """`family`: ours, or its name. `held`: the tensors as the library saves them."""

    family: Family | str
    config: dict[str, Any]
    reference: nn.Module
    held: dict[str, Tensor]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.held.items()}
