"""CUDA graphs of whole training steps.

The host launches thousands of small kernels a step, for which the GPU waits if the model is small; a graph holds them
all and is launched once (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs)."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multimodal.data.batching import map_tensors, tensors_in
from multimodal.errors import UsageError, one_line
from multimodal.train.checkpoint.state import TrainingState
from multimodal.train.optim import set_learning_rate

USUAL = 3  # steps of a shape without a graph: kernels are chosen and states created
MOST_GRAPHS, MOST_SHAPES = 64, 4096  # that are kept, and that are counted

Work = Callable[[list[Any], float | Tensor], tuple[dict[str, Tensor | float], bool]]


class CapturedStep(NamedTuple):
    """A captured step: `replay()` reads `inputs` and writes `metrics`."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    metrics: dict[str, Tensor | float]


class StepGraphs:
    """Steps whose batches have the shapes and the numbers on the host of earlier ones, replayed as CUDA graphs.

    A graph repeats what the host did at its capture, so all that may change from step to step must be a tensor of the
    device: the batches, the learning rate, the counts of the optimizers and of the average. The generator of the device
    may be seeded between replays. Raises UsageError for a step that cannot be captured or that draws on the host."""

    def __init__(self, state: TrainingState, device: torch.device):
        self.state, self.rate = state, torch.zeros((), device=device)
        self.graphs: dict[Hashable, CapturedStep] = {}
        self.seen: Counter[Hashable] = Counter()
        self.pool: Any = None  # memory that the graphs share, since one runs at a time

    def __call__(self, batches: list[Any], work: Work, rate: float) -> tuple[dict[str, Tensor | float], bool]:
        """Return what `work(batches, rate)` returns."""
        key = shapes(batches)
        graph = self.graphs.get(key)
        if graph is None:
            if len(self.seen) >= MOST_SHAPES:
                self.seen.clear()
            self.seen[key] += 1
            if self.seen[key] <= USUAL or len(self.graphs) >= MOST_GRAPHS:
                return work(batches, rate)
            graph = self.graphs[key] = self._captured(batches, work, rate)
        self.rate.fill_(rate)
        torch._foreach_copy_(graph.inputs, tensors_in(batches))
        graph.replay()
        return graph.metrics, True

    def _captured(self, batches: list[Any], work: Work, rate: float) -> CapturedStep:
        inputs, before = map_tensors(batches, Tensor.clone), _host_random()
        try:
            replay, metrics = self.capture(lambda: self._step(inputs, work))
        except RuntimeError as error:
            raise UsageError(f"is not possible: {one_line(error, 300)}", argument="graphs") from error
        finally:
            for optimizer in self.state.optimizers:
                set_learning_rate(optimizer, rate)
        if _host_random() != before:
            raise UsageError("is not possible: the step draws random numbers on the host", argument="graphs")
        return CapturedStep(replay, tensors_in(inputs), metrics)

    def _step(self, inputs: list[Any], work: Work) -> dict[str, Tensor | float]:
        metrics, _ = work(inputs, self.rate)
        self.state.zero_grad()  # returns the gradients to the graphs' memory
        return metrics

    def capture(self, step: Callable[[], dict[str, Tensor | float]]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        # a loader's thread may pin memory meanwhile, which the default mode takes for a fault of the capture
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            metrics = step()
        self.pool = self.pool or graph.pool()
        return graph.replay, metrics


def shapes(batch: Any) -> Hashable:
    """Return a batch's types, shapes, numbers and texts; a batch with anything else equals itself alone."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if batch is None or isinstance(batch, bool | int | float | str):
        return type(batch), batch
    if dataclasses.is_dataclass(batch):
        return type(batch), *(shapes(getattr(batch, field.name)) for field in dataclasses.fields(batch))
    if isinstance(batch, Mapping):
        return type(batch), *((name, shapes(value)) for name, value in batch.items())
    if isinstance(batch, list | tuple):
        return type(batch), *map(shapes, batch)
    return id(batch), object()


def _host_random() -> tuple[Any, ...]:
    """States of torch's and NumPy's generators; checkers of types draw from Python's."""
    kind, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), kind, words.tolist(), rest
