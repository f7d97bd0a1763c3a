"""Zero-shot classification of images in one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import UsageError
from multimodal.inference.prepare import prepare_for_inference
from multimodal.system.files import shown
from multimodal.tasks.classify.classifier import DEFAULT_MODEL, ZeroShotClassifier, check_clip
from multimodal.tasks.classify.classifier_file import load_classifier
from multimodal.tasks.encode.images import batches, name_of
from multimodal.tasks.encode.prompts import Templates
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import load


def classify(
    images: Any, labels: Sequence[str] | None = None, model: str | Path | Checkpoint = DEFAULT_MODEL,
    top: int | None = None, templates: Templates | None = None, batch_size: int = 32, *,
    classifier: "str | Path | ZeroShotClassifier | None" = None, threshold: float | None = None,
    scores: str | None = None, device: str | torch.device | None = None, compute_type: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Score the labels for each image, best first.

    `images`: one or several paths, bytes or PIL images. `templates`: prompts with `{}`, `clip80`, `clip7`, `none`, or a
    mapping of label to prompts (default: the model's own, else `clip7`). `top`: number of labels to return.
    `classifier`: a file of `save_classifier` or a `ZeroShotClassifier`, in place of labels and templates; the latter
    also replaces `model`, `device` and `compute_type`. `threshold`, `scores`: see `ZeroShotClassifier`; `compute_type`,
    `device`: see `prepare_for_inference`. Each call loads the model and encodes the labels: for repeated calls pass a
    `ZeroShotClassifier`.

    Returns `[{"file", "scores": [{"label", "score"}]}]`, with a threshold also `"answer"`: the best label, or None if
    its score is below. Scores are softmax over the labels, sigmoid per label (a model trained with the sigmoid loss),
    or calibrated.

    Raises ImageError, TextError, UsageError, CheckpointError."""
    several = list(images) if isinstance(images, list | tuple) else [images]
    if top is not None and (type(top) is not int or top < 1):
        raise UsageError(f"must be a whole number of at least 1 (got {shown(top)})", argument="top")
    if not isinstance(classifier, ZeroShotClassifier):
        checkpoint = model if isinstance(model, Checkpoint) else load(model)
        classifier = classifier_of(checkpoint, labels, templates, classifier, device=device, compute_type=compute_type)
    elif labels is not None or templates is not None:
        raise UsageError("labels, templates: not allowed with a classifier, which has its own")
    classifier = classifier.using(threshold, scores)
    results = []
    for batch in batches(several, classifier.preprocessing, batch_size):
        if batch.refused:
            raise batch.refused[0][1]
        results += classifier.results_of([name_of(image) for image in batch.read], batch.pixels, top)
    return results


def classifier_of(
    checkpoint: Checkpoint, labels: Sequence[str] | None, templates: Templates | None = None,
    file: str | Path | None = None, *, device: str | torch.device | None = None, compute_type: str = "auto",
) -> "ZeroShotClassifier":  # fmt: skip
    """Build a classifier from labels or load it from a file, prepared for inference."""
    if (labels is None) == (file is None):
        raise UsageError("expected either labels or a classifier")
    if file is not None and not isinstance(file, str | Path):
        raise UsageError(f"classifier must be a path (got {shown(file)})")
    if file is not None and templates is not None:
        raise UsageError("templates: not allowed with a classifier, which has its own")
    check_clip(checkpoint)
    if file is None:
        return ZeroShotClassifier(prepare_for_inference(checkpoint, compute_type, device), labels, templates)
    from multimodal.tasks.encode.features import model_digest

    digest = model_digest(checkpoint)
    return load_classifier(Path(file), prepare_for_inference(checkpoint, compute_type, device), digest)
