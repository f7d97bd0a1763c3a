"""References of contrastive losses."""

from contextlib import nullcontext

import torch
from torch import Tensor

from multimodal.train.distributed.processes import Processes
from multimodal.train.objectives.contrastive import Contrastive, Pairs

EXACT = {"atol": 1e-6, "rtol": 1e-6}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matching_loss(logits: Tensor, same: Tensor) -> Tensor:
    """UniCL's definition; CLIP's where `same` is the diagonal."""
    weights = same.to(logits.dtype)
    rows = -(weights / weights.sum(1, keepdim=True) * logits.log_softmax(1)).sum(1).mean()
    columns = -(weights / weights.sum(0, keepdim=True) * logits.log_softmax(0)).sum(0).mean()
    return (rows + columns) / 2


class Plain:
    """The loop's engine for an objective: one process, no mixed precision."""

    processes, world = Processes(), 1

    def __init__(self, objective):
        self.objective = objective

    def forward(self, batch):
        return self.objective(batch)

    def micro_batch(self, last):
        return nullcontext()

    def backward(self, loss):
        loss.backward()

    def total(self, value):
        return value


def gradient(objective: Contrastive, batches: list[Pairs]) -> tuple[float, dict[str, Tensor]]:
    objective.zero_grad()
    batches = [objective.at_step(batch, 0) for batch in batches]
    loss = objective.backward(Plain(objective), batches)["loss"].item()
    return loss, {name: p.grad.clone() for name, p in objective.model.named_parameters()}
