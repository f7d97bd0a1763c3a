"""The figures of steps, on their way from the device to the host."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Read(NamedTuple):
    step: int
    metrics: dict[str, float]
    tried: bool  # whether the step counts as one: it had items, and its loss scale did not overflow


class Figures:
    """Steps leave their figures here, and the host reads them in order. On a CPU at once; on a GPU one step behind, so
    that the GPU always has a whole step to do while the host waits."""

    def __init__(self, device: torch.device):
        self.behind = 0 if device.type == "cpu" else 1
        self.waiting: deque[tuple[int, Mapping[str, Tensor | float], Tensor | None, torch.cuda.Event | None, bool]] = (
            deque()
        )

    def put(self, step: int, metrics: Mapping[str, Tensor | float], tried: bool) -> None:
        tensors = [value.detach().double() for value in metrics.values() if isinstance(value, Tensor)]
        row = event = None
        if tensors:
            row = torch.stack(tensors).to("cpu", non_blocking=True)  # from a GPU into pinned memory
            if tensors[0].is_cuda:
                event = torch.cuda.Event()
                event.record()
        self.waiting.append((step, metrics, row, event, tried))

    def read(self, behind: int) -> Iterator[Read]:
        """All but the newest `behind`."""
        while len(self.waiting) > behind:
            step, metrics, row, event, tried = self.waiting.popleft()
            if event is not None:
                event.synchronize()
            numbers = iter([] if row is None else row.tolist())
            yield Read(step, {name: next(numbers) if isinstance(value, Tensor) else value
                              for name, value in metrics.items()}, tried)  # fmt: skip
