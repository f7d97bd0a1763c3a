"""What a run lowers: a module around the model whose `backward` leaves the exact gradient of the whole batch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from multimodal.train.distributed.processes import Processes


@runtime_checkable
class Engine(Protocol):
    """What the loop lends to an objective for one step."""

    processes: Processes
    world: int  # of them
    done: int  # steps before this one

    def forward(self, batch: Any) -> Any:
        """The objective's forward, through its wrappers (DDP, compile) and under autocast."""

    def last(self, yes: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients are exchanged after the last one only."""

    def backward(self, loss: Tensor) -> None:
        """loss.backward(), scaled where the precision needs it."""

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""


class Objective(nn.Module):
    """Holds the model as `model`. `forward(batch)` runs it (DDP sees no other call). `partly`: some trained parameters
    have no part in the loss of some steps, for which several processes have to look at each step."""

    partly = False

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @abstractmethod
    def backward(self, engine: Engine, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Leaves in `.grad` the gradient of the loss over all micro-batches of all processes; gives what is to be
        logged, `loss` among it, as numbers on the device: reading one would make a GPU wait for its next work."""

    def after_step(self) -> None:
        """Called when an optimizer has changed the weights: bounds of parameters are kept here."""


class Summed(Objective):
    """A loss that is a weighted sum of means, such as one over tokens and one over items.

    A subclass gives in `forward(batch)` the sums of each term over the batch, in `counts(batch)` how many tokens or
    items each sum runs over (a tensor, where the device has to count them), and in `weights` the weight of each term.
    Each term is divided by its count over all micro-batches and processes, so that accumulation is exact, whatever the
    lengths are (transformers' issue 34191)."""

    weights: Mapping[str, float] = {"loss": 1.0}

    @abstractmethod
    def forward(self, batch: Any) -> dict[str, Tensor]: ...

    @abstractmethod
    def counts(self, batch: Any) -> dict[str, int | Tensor]: ...

    def backward(self, engine: Engine, batches: Sequence[Any]) -> dict[str, Tensor]:
        none = torch.zeros((), device=next(self.model.parameters()).device)
        own = [self.counts(batch) for batch in batches]
        totals = engine.total(torch.stack([sum((count[name] for count in own), none) for name in self.weights]))
        totals, sums = totals.clamp(min=1), torch.zeros_like(totals)
        for number, batch in enumerate(batches):
            with engine.last(number == len(batches) - 1):
                found = engine.forward(batch)
                terms = torch.stack([found[name].float() for name in self.weights])
                engine.backward(self._weighed(terms / totals) * engine.world)  # DDP takes the mean over processes
            sums += terms.detach()
        means = engine.total(sums) / totals
        return {"loss": self._weighed(means)} | dict(zip(self.weights, means, strict=True))

    def _weighed(self, means: Tensor) -> Tensor:
        return sum(weight * mean for weight, mean in zip(self.weights.values(), means, strict=True))
