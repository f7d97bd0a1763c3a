"""What all training candidates share: the optimizer's settings, and what a run of the suite is."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

RATE, WEIGHT_DECAY, BETAS, EPS = 1e-4, 0.05, (0.9, 0.98), 1e-8  # of AdamW in all
CHECKED = 3  # steps whose first and last loss are compared


def runs(step: Callable[[], Any], steps: int = 1) -> Callable[[], np.ndarray | None]:
    """The first run makes three steps and gives the losses of the first and the last, after two updates; each
    further one makes `steps`. `step()` gives a loss, which may wait on the device until it is read."""
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


def autocast(device: str, precision: str) -> AbstractContextManager:
    """`precision`: float32, or autocast to bfloat16 with weights and optimizer in float32."""
    return torch.autocast(device, torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()


def tensors(folder: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in load_file(folder / f"{name}.safetensors").items()}
