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
    equal scores the first is kept, or the last if `newest`. If it cannot be written, training continues."""

    def __init__(
        self, loop: LoopSettings, measure: Callable[[nn.Module], Mapping[str, float]],
        score: Callable[[Mapping[str, float]], float], start: Checkpoint, facts: Mapping[str, Any] | None = None,
        newest: bool = False,
    ):  # fmt: skip
        self.measure, self.score, self.start = measure, score, start
        self.facts, self.newest = dict(facts or {}), newest
        self.folder, self.most = loop.run / "best", -float("inf")
        self.unsaved: Checkpoint | None = None  # the best, if its save failed
        if loop.resume and self.folder.exists() and saved_states(loop.run / "states"):  # else a new run starts
            self.most = score(load_folder(self.folder).card["validation"])

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]:
        figures = self.measure(model)
        score = self.score(figures)
        if score > self.most or (self.newest and score == self.most):
            self.most = score
            card = self.start.card | {"validation": {**figures, "step": step, **self.facts}}
            self.unsaved = replace(self.start, model=model, card=card)
            try:
                self._save()
            except TrainingError as error:
                log.error("%s; training continues", error)
                self.unsaved = copy.deepcopy(self.unsaved)  # training changes the model
        return figures

    def _save(self) -> None:
        if self.unsaved:
            save_checkpoint(self.unsaved, self.folder)
            self.unsaved = None

    def load(self) -> Checkpoint:
        """Load the best checkpoint so far. Raises TrainingError if there is none or it cannot be saved."""
        self._save()
        if self.most == -float("inf"):
            raise TrainingError(f"{self.folder}: holds no checkpoint of this run, whose scores were not finite")
        return load_folder(self.folder)
