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
from multimodal.system.files import shown
from multimodal.tasks.classify.calibration import Calibration
from multimodal.tasks.encode.images import name_of, pixels_of
from multimodal.tasks.encode.native import encode_native
from multimodal.tasks.encode.prompts import (
    NONE,
    Templates,
    check_texts,
    checked_labels,
    prompts_of,
    say_cut,
)
from multimodal.tasks.encode.texts import text_features
from multimodal.tokens.text.vocabulary import TextCut
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint

DEFAULT_MODEL = "clip-vit-16"
SCORES = ("softmax", "sigmoid", "cosine")
Pixels = Float[Tensor, "B 3 H W"] | Sequence[Float[Tensor, "3 _ _"]]  # of one size, or of `native_batches`
ROWS = 4096  # image vectors compared at once
PROMPTS = 16_384  # that are encoded at once: their vectors are 32 MB at 512 numbers each


class ZeroShotClassifier:
    """A CLIP and its label vectors `weights`, which are computed once: after a change of the model, make another.

    `weights`: those that were computed before; then no text is encoded. `calibration`: a map of the
    logits to scores. `threshold`: the answer is none of the labels where the best score is below it. `scores`: softmax,
    sigmoid (by default as the model was trained), or cosine.

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
        """With what is given in place of its own. Raises UsageError, also for other scores under its own threshold."""
        made = ZeroShotClassifier(
            self.checkpoint, self.labels, self.templates, weights=self.weights,
            calibration=calibration or self.calibration, threshold=self.threshold if threshold is None else threshold,
            scores=scores or (None if calibration else self.scores),
        )  # fmt: skip
        if threshold is None and self.threshold is not None and scores not in (None, self.scores):
            raise UsageError(
                f"--scores {scores}: the classifier's threshold {self.threshold:g} is of {self.scores} scores; give a "
                "--threshold too"
            )
        return made

    @torch.inference_mode()
    def _label_vectors(self) -> Float[Tensor, "C D"]:
        """Normalise, mean over templates, normalise, as CLIP_benchmark does."""
        if self.tokenizer is None:
            raise CheckpointError(f"model {self.checkpoint.source}: its tokenizer is not known, and is not guessed")
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
            say_cut(self.labels, prompts, self.tokenizer, min(longest, self.tokenizer.context or longest))
        weights = torch.cat(vectors) if len(vectors) > 1 else vectors[0]
        return F.normalize(weights, dim=-1, out=weights)

    @torch.inference_mode()
    def logits(self, images: Pixels) -> Float[Tensor, "B C"]:
        """Scaled cosines, with the bias of the sigmoid model: a row a picture, in the order of the labels."""
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
        """Its scores: probabilities, or cosines where these are asked for."""
        return self.scored(self.logits(images))

    def scored(self, logits: Float[Tensor, "B C"]) -> Float[Tensor, "B C"]:
        """Of `logits`, calibrated where it is."""
        if self.scores == "cosine":
            bias = self.model.logit_bias
            return (logits if bias is None else logits - bias) / self.model.logit_scale.exp()
        if self.calibration is not None:
            return self.calibration(logits)
        return logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(-1)

    def results(self, images: Sequence[Any], top: int | None = None) -> list[dict[str, Any]]:
        """As `classify` returns them."""
        return self.results_of([name_of(image) for image in images], pixels_of(images, self.preprocessing), top)

    def results_of(self, names: Sequence[str], pixels: Pixels, top: int | None = None) -> list[dict[str, Any]]:
        """As `classify` returns them, of pixels. Raises CheckpointError for scores that are not finite."""
        if not names:
            return []
        rows = self.probabilities(pixels).float().cpu()
        if wrong := (~rows.isfinite().all(1)).nonzero().flatten().tolist():
            raise CheckpointError(f"model {self.checkpoint.source}: the scores of {names[wrong[0]]} are not finite")
        scores, order = (part[:, :top].tolist() for part in rows.sort(descending=True, stable=True))
        return [
            {"file": name, **self._answer(best, places[0]),
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
        if scores not in SCORES:
            raise UsageError(f"scores {scores!r}: unknown (one of {', '.join(SCORES)})")
        if self.calibration is not None and scores not in (usual, "cosine"):
            raise UsageError(
                f"--scores {scores}: the classifier is calibrated ({self.calibration.kind}), to {usual} scores"
            )
        if scores == "sigmoid" and self.model.logit_bias is None and self.calibration is None:
            raise UsageError(
                "--scores sigmoid: the model was trained with softmax, so its logits have no zero of their own; "
                "--calibrate with --calibration platt gives each label a probability by itself"
            )
        least = -1 if scores == "cosine" else 0
        if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
            raise UsageError(f"threshold: expected a number ({shown(threshold)})")
        if threshold is not None and not least <= threshold <= 1:
            raise UsageError(f"--threshold {threshold}: not from {least} to 1, where {scores} scores lie")
        if threshold is not None and NONE in self.labels:
            raise UsageError(f"labels: {NONE!r} is the answer below the threshold, and no label beside it")
        return scores, threshold


def check_clip(checkpoint: Checkpoint) -> None:
    if not isinstance(checkpoint.model, CLIP):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, classification needs a clip")
    known_preprocessing(checkpoint)


def _parts(prompts: Sequence[Sequence[str]]) -> Iterable[list[Sequence[str]]]:
    """Labels whose prompts are encoded together."""
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
