"""The best checkpoint of a run, beside its newest states."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.errors import TrainingError
from multimodal.train.checkpoint.atomic import saved_states
from multimodal.train.settings import LoopSettings
from multimodal.weights.files.store_options import Store
from multimodal.weights.folder import Checkpoint, load_folder, save_folder

log = logging.getLogger(__name__)


def save_checkpoint(checkpoint: Checkpoint, folder: Path, store: Store = "float32") -> None:
    """Save as `save_folder` does. Raises TrainingError, naming the folder, if the disk is full or read-only."""
    try:
        save_folder(checkpoint, folder, store)
    except OSError as error:
        raise TrainingError(f"{folder}: the checkpoint cannot be saved: {error.strerror or error}") from error


class KeepBest:
    """Evaluation that keeps the checkpoint with the highest score in `run/best`.

    `start`: the checkpoint without its trained model. Its card gets `validation`: the figures, step and `facts`. Of
    equal scores the first is kept, or the last if `newest`. If it cannot be written, training continues. A resumed run
    measures its earlier best once more, since it may validate on other data now."""

    def __init__(
        self, loop: LoopSettings, measure: Callable[[nn.Module], Mapping[str, float]],
        score: Callable[[Mapping[str, float]], float], start: Checkpoint, facts: Mapping[str, Any] | None = None,
        newest: bool = False,
    ):  # fmt: skip
        self.measure, self.score, self.start = measure, score, start
        self.facts, self.newest = dict(facts or {}), newest
        self.folder, self.most, self.device = loop.run / "best", -float("inf"), loop.device
        self.unsaved: Checkpoint | None = None  # the best, if its save failed
        # not measured yet by this run; without a state a new run starts
        self.earlier = loop.resume and self.folder.exists() and bool(saved_states(loop.run / "states"))

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]:
        self._measure_earlier()
        figures = self.measure(model)
        score = self.score(figures)
        if score > self.most or (self.newest and score == self.most):
            self.most = score
            self._keep(model, step, figures)
        return figures

    def _measure_earlier(self) -> None:
        """Score the best of the run before it was resumed. Its card changes only if its figures do."""
        if not self.earlier:
            return
        known = load_folder(self.folder)
        figures, card = self.measure(known.model.to(self.device).eval()), known.card["validation"]
        self.most, self.earlier = self.score(figures), False
        if card != self._validation(card["step"], figures):
            told = ", ".join(f"{name} {value} (was {card.get(name)})" for name, value in figures.items())
            log.info("%s: measured again: %s", self.folder, told)
            self._keep(known.model, card["step"], figures)

    def _validation(self, step: int, figures: Mapping[str, float]) -> dict[str, Any]:
        return {**figures, "step": step, **self.facts}

    def _keep(self, model: nn.Module, step: int, figures: Mapping[str, float]) -> None:
        card = self.start.card | {"validation": self._validation(step, figures)}
        self.unsaved = replace(self.start, model=model, card=card)
        try:
            self._save()
        except TrainingError as error:
            log.error("%s; training continues", error)
            self.unsaved = copy.deepcopy(self.unsaved)  # training changes the model

    def _save(self) -> None:
        if self.unsaved:
            save_checkpoint(self.unsaved, self.folder)
            self.unsaved = None

    def load(self) -> Checkpoint:
        """Load the best checkpoint so far. Raises TrainingError if there is none or it cannot be saved."""
        self._measure_earlier()  # the run was complete
        self._save()
        if self.most == -float("inf"):
            raise TrainingError(f"{self.folder}: holds no checkpoint of this run, whose scores were not finite")
        return load_folder(self.folder)
