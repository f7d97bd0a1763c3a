"""Training objectives: modules around a model whose `backward` leaves the exact gradient of the full batch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from multimodal.train.distributed.processes import Processes


@runtime_checkable
class Engine(Protocol):
    """The part of the loop that an objective uses."""

    processes: Processes
    world: int  # number of processes

    def forward(self, batch: Any) -> Any:
        """Run the objective's forward through its wrappers (DDP, compile) and under autocast."""

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Context of a micro-batch's forward and backward: gradients are exchanged after the last one only."""

    def backward(self, loss: Tensor) -> None:
        """Run loss.backward(), scaled for float16."""

    def total(self, value: Tensor) -> Tensor:
        """Sum over all processes."""


class Objective(nn.Module):
    """Holds the model as `model`. `forward(batch)` runs it (DDP sees no other call). `partly`: some trained parameters
    get no gradient in some steps, which several processes must check at each step. `uneven`: modules that a micro-batch
    runs any number of times; with `even`, which sharded weights need, all others run equally often in each."""

    partly = even = False
    uneven: Sequence[nn.Module] = ()

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @abstractmethod
    def backward(self, engine: Engine, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Leave in `.grad` the gradient of the loss over all micro-batches of all processes. Returns the metrics, with
        `loss`, as scalars on the device: reading one would make the host wait for the GPU."""

    def at_step(self, batch: Any, step: int) -> Any:
        """Return what `backward` gets of a micro-batch in step `step`, the only place where the number counts."""
        return batch

    def after_step(self) -> None:
        """Bound parameters after the optimizer has changed them."""


class Summed(Objective):
    """A weighted sum of means, such as one over tokens and one over items.

    A subclass's `forward(batch)` returns the sum of each term over the batch, `counts(batch)` the number of tokens or
    items in each sum, or their weight (a tensor if the device must count them); `weights` holds the weight of each
    term. Each term is divided by its count over all micro-batches and processes, so accumulation is exact for any
    lengths (transformers issue 34191)."""

    weights: Mapping[str, float] = {"loss": 1.0}

    @abstractmethod
    def forward(self, batch: Any) -> dict[str, Tensor]: ...

    @abstractmethod
    def counts(self, batch: Any) -> dict[str, float | Tensor]: ...

    def backward(self, engine: Engine, batches: Sequence[Any]) -> dict[str, Tensor]:
        zero = torch.zeros((), device=next(self.model.parameters()).device)
        counts = [self.counts(batch) for batch in batches]
        totals = engine.total(torch.stack([sum((count[name] for count in counts), zero) for name in self.weights]))
        totals, sums = totals.clamp(min=1), torch.zeros_like(totals)
        for number, batch in enumerate(batches):
            with engine.micro_batch(number == len(batches) - 1):
                losses = engine.forward(batch)
                terms = torch.stack([losses[name].float() for name in self.weights])
                engine.backward(self._weighted(terms / totals) * engine.world)  # DDP averages over processes
            sums += terms.detach()
        means = engine.total(sums) / totals
        return {"loss": self._weighted(means)} | dict(zip(self.weights, means, strict=True))

    def _weighted(self, means: Tensor) -> Tensor:
        return sum(weight * mean for weight, mean in zip(self.weights.values(), means, strict=True))
