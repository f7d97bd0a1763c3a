"""The training loop: owned by a recipe, which gives it an objective and a loader, and calls `fit`."""

import copy
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal.train.loader import Loader
from multimodal.train.objective import Objective
from multimodal.train.optim import Average, OptimSettings, optimizers, set_learning_rate, share_of_peak
from multimodal.train.state import newest_state, save_state

Evaluate = Callable[[nn.Module, int], dict[str, float]]


@dataclass(frozen=True)
class LoopSettings:
    """`run`: folder of states, metrics and the report. `accumulate`: micro-batches a step."""

    run: Path
    steps: int
    optim: OptimSettings = field(default_factory=OptimSettings)
    accumulate: int = 1
    precision: Literal["float32", "autocast", "bfloat16", "float16"] = "autocast"
    compile: bool = False
    device: str = "cpu"
    threads: int = 0  # 0: torch's own choice
    workers: int = 0
    seed: int = 0
    log_every: int = 50
    save_every: int = 500
    evaluate_every: int = 500
    resume: bool = False


class Loop:
    """Model, optimisers, average and step count, which move together and are saved together.

    `evaluate(model, step)` is given the averaged model (the plain one where there is no average), in eval mode."""

    def __init__(self, settings: LoopSettings, objective: Objective, loader: Loader, evaluate: Evaluate | None = None):
        self.settings, self.loader, self.evaluate = settings, loader, evaluate
        self.objective = objective.to(settings.device)
        self.optimizers = optimizers(objective.model, settings.optim)
        self.average = Average(objective.model, settings.optim.average) if settings.optim.average else None
        self.done = 0
        self.world = 1

    # what an objective may use
    def forward(self, batch: Any) -> Any:
        auto = self.settings.precision == "autocast"
        with torch.autocast(self.settings.device, torch.bfloat16) if auto else nullcontext():
            return self.objective(batch)

    def last(self, yes: bool) -> AbstractContextManager:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def total(self, value: Tensor) -> Tensor:
        return value

    def step(self, batches: list[Any]) -> dict[str, float]:
        s = self.settings
        torch.manual_seed(s.seed * 1_000_003 + self.done)  # dropout of a resumed run is that of an unbroken one
        self.objective.train().zero_grad()
        metrics = self.objective.backward(self, batches)
        norm = torch.nn.utils.clip_grad_norm_(self.objective.model.parameters(), s.optim.clip)
        if math.isfinite(norm) and math.isfinite(metrics["loss"]):
            for optimizer in self.optimizers:
                set_learning_rate(optimizer, s.optim.rate * share_of_peak(s.optim, self.done, s.steps))
                optimizer.step()
            if self.average:
                self.average.update(self.objective.model)
        self.done += 1
        return metrics

    def fit(self) -> nn.Module:
        """Runs to the last step; gives the trained model (averaged), in eval mode on the CPU."""
        s = self.settings
        if s.threads:
            torch.set_num_threads(s.threads)
        if s.resume:
            self.resume()
        began = time.time()
        # PyTorch's fused attention for CPUs is several times slower backwards than matrix products on short rows
        with sdpa_kernel(SDPBackend.MATH) if s.device == "cpu" else nullcontext():
            for step in self.loader.start(self.done):
                if self.done >= s.steps:
                    break
                metrics = self.step(step.batches)
                last = self.done == s.steps
                if self.done % s.log_every == 0 or last:
                    print(f"step {self.done}/{s.steps} {metrics} {time.time() - began:.0f} s", flush=True)
                if self.evaluate and (self.done % s.evaluate_every == 0 or last):
                    print(f"step {self.done} {self.evaluate(self.trained(), self.done)}", flush=True)
                if self.done % s.save_every == 0 or last:
                    self.save()
        return self.trained()

    def trained(self) -> nn.Module:
        model = copy.deepcopy(self.objective.model)
        if self.average:
            model.load_state_dict(self.average.weights)
        return model.eval()

    def save(self) -> None:
        state = {"done": self.done, "model": self.objective.model.state_dict(),
                 "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}  # fmt: skip
        if self.average:
            state |= {"average": self.average.weights, "updates": self.average.updates}
        save_state(self.settings.run, self.done, state)

    def resume(self) -> None:
        state = newest_state(self.settings.run)
        if state is None:
            return
        self.objective.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.average:
            self.average.weights, self.average.updates = state["average"], state["updates"]
        self.done = state["done"]
