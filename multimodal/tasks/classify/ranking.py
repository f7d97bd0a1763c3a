"""Scores of images as ranked labels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.errors import CheckpointError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.tasks.classify.calibration import Calibration
from multimodal.tasks.encode.images import ImageBatch, name_of, pixels_of
from multimodal.tasks.encode.prompts import NONE, Templates
from multimodal.tasks.encode.videos import Clip, clip_mean, time_of
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.weights.folder import Checkpoint

Pixels = Float[Tensor, "B 3 H W"] | Sequence[Float[Tensor, "3 _ _"]]  # of one size, or of `native_batches`


class ImageClassifier(ABC):
    """Base of classifiers that score every label for an image. `threshold`: the answer is None where the best score is
    below."""

    checkpoint: Checkpoint
    model: nn.Module
    preprocessing: Preprocessing
    labels: list[str]
    templates: Templates
    calibration: Calibration | None
    scores: str
    threshold: float | None

    @abstractmethod
    def logits(self, images: Pixels) -> Float[Tensor, "B C"]:
        """Logits in the order of the labels."""

    @abstractmethod
    def scored(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        """Scores of logits."""

    @abstractmethod
    def using(self, threshold: float | None = None, scores: str | None = None) -> Self:
        """A copy with changed settings. Raises UsageError."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @inference_mode()
    def probabilities(self, images: Pixels) -> Float[Tensor, "B C"]:
        """Scores of images: probabilities, or cosines."""
        return self.scored(self.logits(images))

    def results(self, images: Sequence[Any], top: int | None = None) -> list[dict[str, Any]]:
        """Results as `classify` returns them."""
        return self.results_of([name_of(image) for image in images], pixels_of(images, self.preprocessing), top)

    def batch_results(self, batch: ImageBatch, part: slice, top: int | None) -> list[dict[str, Any]]:
        """Results of a part of a batch."""
        return self.results_of([name_of(item) for item in batch.read[part]], batch.pixels[part], top)

    def results_of(self, names: Sequence[str], pixels: Pixels, top: int | None = None) -> list[dict[str, Any]]:
        """Results of preprocessed images. Raises CheckpointError for scores that are not finite."""
        return self._ranked(names, self.probabilities(pixels).float().cpu(), top) if names else []

    @inference_mode()
    def clip_result(self, clip: Clip, top: int | None = None) -> dict[str, Any]:
        """The result of a whole video: scores of the mean of its frames' logits (a CLIP's are those of the mean of the
        frames' unit features). Raises VideoError."""
        rows = self.scored(clip_mean(clip.batches, self.logits).to(self.device)).float().cpu()
        return self._ranked([name_of(clip.item)], rows, top)[0]

    def _ranked(self, names: Sequence[str], rows: Float[Tensor, "B C"], top: int | None) -> list[dict[str, Any]]:
        if wrong := (~rows.isfinite().all(1)).nonzero().flatten().tolist():
            raise CheckpointError(f"model {self.checkpoint.source}: the scores of {names[wrong[0]]} are not finite")
        scores, order = (part[:, :top].tolist() for part in rows.sort(descending=True, stable=True))
        return [
            {"file": name, **time_of(name), **self._answer(best, places[0]),
             "scores": [{"label": self.labels[i], "score": s} for i, s in zip(places, best, strict=True)]}
            for name, best, places in zip(names, scores, order, strict=True)
        ]  # fmt: skip

    def _answer(self, best: Sequence[float], place: int) -> dict[str, Any]:
        if self.threshold is None:
            return {}
        return {"answer": self.labels[place] if best[0] >= self.threshold else None}

    def check_threshold(self, threshold: float | None, scores: str) -> None:
        """Raises UsageError for a threshold that no score, or every one, reaches."""
        least = -1 if scores == "cosine" else 0
        if threshold is not None and not least <= threshold <= 1:
            raise UsageError(f"must be in [{least}, 1] for {scores} scores (got {threshold:g})", argument="threshold")
        if threshold is not None and NONE in self.labels:
            raise UsageError(f"labels: {NONE!r} is reserved for answers below the threshold")
