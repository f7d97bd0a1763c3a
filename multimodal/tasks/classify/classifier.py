"""Zero-shot image classification (Radford et al. 2021, section 3.1)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.clip import CLIP
from multimodal.tasks.classify.calibration import Calibration
from multimodal.tasks.classify.options import ClassifyOptions
from multimodal.tasks.classify.ranking import ImageClassifier, Pixels
from multimodal.tasks.encode.native import encode_native
from multimodal.tasks.encode.prompts import (
    Templates,
    check_texts,
    checked_labels,
    prompts_of,
    warn_cut,
)
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.encode import text_features
from multimodal.weights.folder import Checkpoint

ROWS = 4096  # image vectors compared at once
PROMPTS = 16_384  # encoded at once: 32 MB of vectors at 512 numbers each


class ZeroShotClassifier(ImageClassifier):
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
        self.templates: Templates = templates_of(checkpoint, templates)
        self.calibration = calibration
        self.scores, self.threshold = self._checked(scores, threshold)
        self.weights = self._label_vectors() if weights is None else weights.to(self.device)

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

    @inference_mode()
    def _label_vectors(self) -> Float[Tensor, "C D"]:
        """Normalize, mean over templates, normalize, as CLIP_benchmark does."""
        self.checkpoint.required_tokenizer()
        prompts = prompts_of(self.labels, self.templates)
        check_texts(self.labels, prompts, self.tokenizer)
        vectors: list[Tensor] = []
        cut: list[int] = []
        for part in _parts(prompts):
            found = text_features(self.model, self.tokenizer, [text for texts in part for text in texts], cut=cut)
            lengths = torch.tensor([len(texts) for texts in part], device=found.device)
            vectors.append(torch.segment_reduce(found.float(), "mean", lengths=lengths))
            del found
        if any(cut):
            longest = self.model.config.text.context
            warn_cut(self.labels, prompts, self.tokenizer, self.tokenizer.length_in(longest))
        weights = torch.cat(vectors) if len(vectors) > 1 else vectors[0]
        return F.normalize(weights, dim=-1, out=weights)

    @inference_mode()
    def logits(self, images: Pixels) -> Float[Tensor, "B C"]:
        """Scaled cosines with the bias of a sigmoid model, in the order of the labels."""
        if isinstance(images, Tensor):
            return self.model.logits(self.model.encode_image(images.to(self.device, non_blocking=True)), self.weights)
        return self.model.logits(encode_native(self.model, images), self.weights)

    @inference_mode()
    def vector_logits(self, vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """Logits of image vectors, in float32 on the CPU."""
        parts = vectors.split(ROWS)
        return torch.cat([self.model.logits(part.to(self.weights), self.weights).float().cpu() for part in parts])

    def scored(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        """Scores of logits, calibrated if the classifier is."""
        if self.scores == "cosine":
            bias = self.model.logit_bias
            return (logits if bias is None else logits - bias) / self.model.logit_scale.exp()
        if self.calibration is not None:
            return self.calibration(logits)
        return logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)

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
        self.check_threshold(threshold, scores)
        return scores, threshold


def templates_of(checkpoint: Checkpoint, given: Templates | None = None) -> Templates:
    """The given templates, or the model's own."""
    return checkpoint.card.get("templates", "clip7") if given is None else given


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
