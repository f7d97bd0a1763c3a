"""Queue that carries each step's metrics from the device to the host."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class StepRecord(NamedTuple):
    step: int
    metrics: dict[str, float]
    counted: bool  # False for a step without items, or one whose loss scale overflowed


class MetricsQueue:
    """Steps push their metrics, the host pops them in order: at once on a CPU, one step later on a GPU, so that the GPU
    always has a whole step to run while the host waits."""

    def __init__(self, device: torch.device):
        self.delay = 0 if device.type == "cpu" else 1
        self.waiting: deque[tuple[int, Mapping[str, Tensor | float], Tensor | None, torch.cuda.Event | None, bool]] = (
            deque()
        )

    def push(self, step: int, metrics: Mapping[str, Tensor | float], counted: bool) -> None:
        tensors = [value.detach().double() for value in metrics.values() if isinstance(value, Tensor)]
        row = event = None
        if tensors:
            row = torch.stack(tensors).to("cpu", non_blocking=True)  # from a GPU into pinned memory
            if tensors[0].is_cuda:
                event = torch.cuda.Event()
                event.record()
        self.waiting.append((step, metrics, row, event, counted))

    def pop(self, delay: int = 0) -> Iterator[StepRecord]:
        """Yield all steps but the newest `delay`."""
        while len(self.waiting) > delay:
            step, metrics, row, event, counted = self.waiting.popleft()
            if event is not None:
                event.synchronize()
            numbers = iter([] if row is None else row.tolist())
            values = {name: next(numbers) if isinstance(value, Tensor) else value for name, value in metrics.items()}
            yield StepRecord(step, values, counted)
