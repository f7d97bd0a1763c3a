"""The best checkpoint of a run, beside its newest states."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from multimodal.train.settings import LoopSettings
from multimodal.weights.folder import Checkpoint, load_folder, save_folder


class KeepBest:
    """Evaluation that keeps the checkpoint with the highest score in `run/best`.

    `start`: the checkpoint without its trained model. Its card gets `validation`: the figures, step and `facts`. Of
    equal scores the first is kept, or the last if `newest`."""

    def __init__(
        self, loop: LoopSettings, measure: Callable[[nn.Module], Mapping[str, float]],
        score: Callable[[Mapping[str, float]], float], start: Checkpoint, facts: Mapping[str, Any] | None = None,
        newest: bool = False,
    ):  # fmt: skip
        self.measure, self.score, self.start = measure, score, start
        self.facts, self.newest = dict(facts or {}), newest
        self.folder, self.most = loop.run / "best", -float("inf")
        if loop.resume and self.folder.exists():
            self.most = score(self.load().card["validation"])

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]:
        figures = self.measure(model)
        score = self.score(figures)
        if score > self.most or (self.newest and score == self.most):
            self.most = score
            card = self.start.card | {"validation": {**figures, "step": step, **self.facts}}
            save_folder(replace(self.start, model=model, card=card), self.folder)
        return figures

    def load(self) -> Checkpoint:
        """Load the best checkpoint so far."""
        return load_folder(self.folder)
