"""Zero-shot image classification (Radford et al. 2021, section 3.1)."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import CheckpointError, UsageError
from multimodal.models.clip import CLIP
from multimodal.tasks.classify.calibration import Calibration
from multimodal.tasks.classify.options import ClassifyOptions
from multimodal.tasks.encode.images import name_of, pixels_of
from multimodal.tasks.encode.native import encode_native
from multimodal.tasks.encode.prompts import (
    NONE,
    Templates,
    check_texts,
    checked_labels,
    prompts_of,
    warn_cut,
)
from multimodal.tasks.encode.videos import Clip, clip_mean, time_of
from multimodal.tokens.text.tokenizer import TextCut
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint

Pixels = Float[Tensor, "B 3 H W"] | Sequence[Float[Tensor, "3 _ _"]]  # of one size, or of `native_batches`
ROWS = 4096  # image vectors compared at once
PROMPTS = 16_384  # encoded at once: 32 MB of vectors at 512 numbers each


class ZeroShotClassifier:
    """CLIP with label vectors `weights`, computed once: build a new classifier after changing the model.

    `weights`: precomputed label vectors, so that no text is encoded. `calibration`: maps logits to scores. `threshold`:
    below it the answer is "none of these". `scores`: softmax, sigmoid (default: the training loss), or cosine.

    Raises UsageError, TextError, CheckpointError."""

    def __init__(
        self, checkpoint: Checkpoint, labels: Sequence[str], templates: Templates | None = None, *,
        weights: Float[Tensor, "C D"] | None = None, calibration: Calibration | None = None,
        threshold: float | None = None, scores: str | None = None,
    ):  # fmt: skip
        check_clip(checkpoint)
        self.checkpoint, self.model = checkpoint, checkpoint.model
        self.preprocessing, self.tokenizer = known_preprocessing(checkpoint), checkpoint.tokenizer
        self.labels = checked_labels(labels)
        self.templates: Templates = checkpoint.card.get("templates", "clip7") if templates is None else templates
        self.calibration = calibration
        self.scores, self.threshold = self._checked(scores, threshold)
        self.weights = self._label_vectors() if weights is None else weights.to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def using(
        self, threshold: float | None = None, scores: str | None = None, calibration: Calibration | None = None
    ) -> "ZeroShotClassifier":
        """A copy with changed settings. Raises UsageError, also for other scores with the old threshold."""
        made = ZeroShotClassifier(
            self.checkpoint, self.labels, self.templates, weights=self.weights,
            calibration=calibration or self.calibration, threshold=self.threshold if threshold is None else threshold,
            scores=scores or (None if calibration else self.scores),
        )  # fmt: skip
        if threshold is None and self.threshold is not None and scores not in (None, self.scores):
            raise UsageError(
                f"{scores}: the threshold {self.threshold:g} of the classifier is for {self.scores} scores; set "
                "threshold too",
                argument="scores",
            )
        return made

    @torch.inference_mode()
    def _label_vectors(self) -> Float[Tensor, "C D"]:
        """Normalise, mean over templates, normalise, as CLIP_benchmark does."""
        self.checkpoint.required_tokenizer()
        prompts = prompts_of(self.labels, self.templates)
        check_texts(self.labels, prompts, self.tokenizer)
        vectors, cut = [], False
        for part in _parts(prompts):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = text_features(self.model, self.tokenizer, [text for texts in part for text in texts])
            lengths = torch.tensor([len(texts) for texts in part], device=found.device)
            vectors.append(torch.segment_reduce(found.float(), "mean", lengths=lengths))
            del found
            for warning in caught:
                cut |= issubclass(warning.category, TextCut)
                if not issubclass(warning.category, TextCut):
                    warnings.warn(warning.message, stacklevel=3)
        if cut:
            longest = self.model.config.text.context
            warn_cut(self.labels, prompts, self.tokenizer, min(longest, self.tokenizer.context or longest))
        weights = torch.cat(vectors) if len(vectors) > 1 else vectors[0]
        return F.normalize(weights, dim=-1, out=weights)

    @torch.inference_mode()
    def logits(self, images: Pixels) -> Float[Tensor, "B C"]:
        """Scaled cosines with the bias of a sigmoid model, in the order of the labels."""
        if isinstance(images, Tensor):
            return self.model.logits(self.model.encode_image(images.to(self.device, non_blocking=True)), self.weights)
        return self.model.logits(encode_native(self.model, images).features, self.weights)

    @torch.inference_mode()
    def vector_logits(self, vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """Logits of image vectors, in float32 on the CPU."""
        parts = vectors.split(ROWS)
        return torch.cat([self.model.logits(part.to(self.weights), self.weights).float().cpu() for part in parts])

    @torch.inference_mode()
    def probabilities(self, images: Pixels) -> Float[Tensor, "B C"]:
        """Scores of images: probabilities, or cosines."""
        return self.scored(self.logits(images))

    def scored(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        """Scores of logits, calibrated if the classifier is."""
        if self.scores == "cosine":
            bias = self.model.logit_bias
            return (logits if bias is None else logits - bias) / self.model.logit_scale.exp()
        if self.calibration is not None:
            return self.calibration(logits)
        return logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)

    def results(self, images: Sequence[Any], top: int | None = None) -> list[dict[str, Any]]:
        """Results as `classify` returns them."""
        return self.results_of([name_of(image) for image in images], pixels_of(images, self.preprocessing), top)

    def results_of(self, names: Sequence[str], pixels: Pixels, top: int | None = None) -> list[dict[str, Any]]:
        """Results of preprocessed images. Raises CheckpointError for scores that are not finite."""
        return self._ranked(names, self.probabilities(pixels).float().cpu(), top) if names else []

    @torch.inference_mode()
    def clip_result(self, clip: Clip, top: int | None = None) -> dict[str, Any]:
        """The result of a whole video: scores of the mean of its frames' logits, which are those of the mean of their
        unit features. Raises VideoError."""
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

    def _checked(self, scores: str | None, threshold: float | None) -> tuple[str, float | None]:
        usual = self.model.config.loss
        if self.calibration is not None:
            usual = "softmax" if self.calibration.kind == "temperature" else "sigmoid"
        scores = scores or usual
        ClassifyOptions.checked({"scores": scores, "threshold": threshold})
        if self.calibration is not None and scores not in (usual, "cosine"):
            raise UsageError(
                f"{scores}: the classifier is calibrated ({self.calibration.kind}) for {usual} scores",
                argument="scores",
            )
        if scores == "sigmoid" and self.model.logit_bias is None and self.calibration is None:
            raise UsageError(
                "sigmoid: the model was trained with softmax, so its logits have no zero; "
                "calibration='platt' gives each label its own probability",
                argument="scores",
            )
        least = -1 if scores == "cosine" else 0
        if threshold is not None and not least <= threshold <= 1:
            raise UsageError(f"must be in [{least}, 1] for {scores} scores (got {threshold:g})", argument="threshold")
        if threshold is not None and NONE in self.labels:
            raise UsageError(f"labels: {NONE!r} is reserved for answers below the threshold")
        return scores, threshold


def check_clip(checkpoint: Checkpoint) -> None:
    if not isinstance(checkpoint.model, CLIP):
        raise UsageError(f"model {checkpoint.source}: expected a CLIP model, got {checkpoint.kind}")
    known_preprocessing(checkpoint)


def _parts(prompts: Sequence[Sequence[str]]) -> Iterable[list[Sequence[str]]]:
    """Split labels into groups whose prompts are encoded together."""
    part: list[Sequence[str]] = []
    count = 0
    for texts in prompts:
        if part and count + len(texts) > PROMPTS:
            yield part
            part, count = [], 0
        part.append(texts)
        count += len(texts)
    if part:
        yield part


def saved_templates(templates: Templates) -> Any:
    """JSON-ready."""
    if isinstance(templates, Mapping):
        return {label: list(prompts) for label, prompts in templates.items()}
    return templates if isinstance(templates, str) else list(templates)
