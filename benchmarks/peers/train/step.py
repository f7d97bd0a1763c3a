"""Optimizer settings and runs of all training candidates."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Run = Callable[[], np.ndarray | None]
RATE, WEIGHT_DECAY, BETAS, EPS = 1e-4, 0.05, (0.9, 0.98), 1e-8  # AdamW's in all candidates
CHECKED = 3  # steps whose first and last loss are compared


def runs(step: Callable[[], Any], steps: int = 1) -> Run:
    """The first run makes three steps and returns the first and the last loss, after two updates; further runs make
    `steps`. `step()` returns a loss, which may be read later."""
    fresh = True

    def run() -> np.ndarray | None:
        nonlocal fresh
        if fresh:
            fresh = False
            losses = [float(step()) for _ in range(CHECKED)]
            return np.array([losses[0], losses[-1]])
        for _ in range(steps):
            step()
        return None

    return run


def weight_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms do not."""
    return [{"params": [p for p in model.parameters() if (p.ndim >= 2) == wide], "weight_decay": decay}
            for wide, decay in ((True, WEIGHT_DECAY), (False, 0.0))]  # fmt: skip


def autocast(device: str, precision: str) -> AbstractContextManager:
    """`precision`: float32, or autocast to bfloat16 with weights and optimizer in float32."""
    return torch.autocast(device, torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()


def tensors(folder: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in load_file(folder / f"{name}.safetensors").items()}
