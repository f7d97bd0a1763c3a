"""Optimisers, their groups, and schedules."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True)
class OptimSettings:
    """`rate`: peak learning rate. `warmup`: steps. `floor`: share of the peak at the end. `decay`: share of the
    steps in which WSD comes down. `clip`: largest norm of the gradient. `average`: decay of the weights' moving
    average (0: none)."""

    rate: float = 1e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: int = 100
    floor: float = 0.0
    decay: float = 0.2
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    average: float = 0.0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; norms, biases, gains, scales and other vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def optimizers(model: nn.Module, s: OptimSettings) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon (Jordan et al. 2024) for the matrices inside the blocks, and AdamW for embeddings, heads, norms
    and biases."""
    groups = parameter_groups(model, s.weight_decay)
    made: list[torch.optim.Optimizer] = []
    if s.optimizer == "muon":
        inner = {id(p) for name, p in model.named_parameters() if ".blocks." in f".{name}"}
        matrices = [p for p in groups[0]["params"] if p.ndim == 2 and id(p) in inner]
        taken = {id(p) for p in matrices}
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in taken]
        made.append(
            torch.optim.Muon(matrices, lr=s.rate, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    made.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=s.rate, betas=s.betas, fused=True))
    return made


def share_of_peak(s: OptimSettings, step: int, total: int) -> float:
    """Share of the peak learning rate at `step`: linear up over the warm-up; then a half cosine down to the floor
    at `total` (Loshchilov and Hutter 2017), or flat and linear down over the last steps (WSD, Hu et al. 2024)."""
    if step < s.warmup:
        return (step + 1) / s.warmup
    if s.schedule == "cosine":
        done = min(1.0, (step - s.warmup) / max(1, total - s.warmup))
        return s.floor + (1 - s.floor) * 0.5 * (1 + math.cos(math.pi * done))
    left = max(0.0, (total - step) / max(1.0, s.decay * total))
    return max(s.floor, min(1.0, left))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


class Average:
    """Exponential moving average of a model's weights (Polyak and Juditsky 1992)."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        # the bound lets early averages follow, instead of remembering the random start
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                self.weights[name].lerp_(tensor, 1 - decay)
            else:
                self.weights[name].copy_(tensor)
