"""FLOP counts of a training step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from multimodal.data.batching import tensors_in
from multimodal.train.losses import forward_only

Result = TypeVar("Result")

# dense bfloat16 matrix FLOP/s without sparsity, from the vendors' data sheets
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12}


class StepFlops(NamedTuple):
    """FLOPs per element of a batch (`elements`). `model`: three forwards, as for MFU; `hardware`: as executed,
    recomputed forwards included, as for HFU."""

    model: float
    hardware: float


def peak_flops() -> float | None:
    """Return the peak FLOP/s of the current GPU; None on a CPU or an unlisted GPU."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def count_flops(function: Callable[[], Result]) -> tuple[Result, int]:
    """Return the result of `function()` and the FLOPs of its matrix products, convolutions and attention, forward and
    backward. Compiled blocks run eagerly meanwhile."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def elements(batch: Any) -> int:
    """Return the size of a batch's largest tensor: in proportion to its tokens, frames or pixels."""
    return max((tensor.numel() for tensor in tensors_in(batch)), default=0)


class FlopCounter:
    """FLOPs of the first step of a run, on a GPU of known peak."""

    def __init__(self) -> None:
        self.step: StepFlops | None = None
        self.forward: int | None = None  # of the first micro-batch
        self.enabled = peak_flops() is not None

    def count_forward(self, objective: nn.Module, batch: Any) -> None:
        if self.enabled and self.forward is None:
            objective.eval()  # draws no random numbers and changes no statistics
            with forward_only(), torch.enable_grad():
                _, self.forward = count_flops(lambda: objective(batch))
            objective.train()

    def count_step(self, run: Callable[[], Result], batches: Sequence[Any]) -> Result:
        """Return the result of `run`, all forwards and backwards of the step."""
        if not self.enabled or self.step is not None:
            return run()
        result, executed = count_flops(run)
        executed -= self.forward  # by the counting itself
        self.step = StepFlops(3 * self.forward / elements(batches[0]), executed / sum(map(elements, batches)))
        return result
