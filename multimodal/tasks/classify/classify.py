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
    """Scores of each label for each picture, best first.

    `images`: one or several of path, bytes or PIL image. `templates`: prompts with `{}`, or `clip80`, `clip7`,
    `none`, or the prompts by label; by default those that the model was made with, else `clip7`. `top`: how many labels
    to return. `classifier`: in place of labels and templates, a file of `save_classifier`, or one that is made already
    (then `model`, `device` and `compute_type` are its own). `threshold`, `scores`: as in `ZeroShotClassifier`.
    `compute_type`, `device`: see `prepare_for_inference`. Each call loads and prepares the model and encodes the
    labels; whoever calls more than once passes a prepared checkpoint or, better, a `ZeroShotClassifier` of one.
    Returns `[{"file", "scores": [{"label", "score"}]}]`, with a threshold also `"answer"`: the best label, or None
    where its score is below. Scores are a softmax over the labels (CLIP), a probability for each label by itself (a
    model trained with the sigmoid loss), or what the classifier was calibrated to.
    Raises ImageError, TextError, UsageError, CheckpointError."""
    several = list(images) if isinstance(images, list | tuple) else [images]
    if top is not None and (type(top) is not int or top < 1):
        raise UsageError(f"top: expected a whole number of 1 or more ({shown(top)})")
    if not isinstance(classifier, ZeroShotClassifier):
        given = model if isinstance(model, Checkpoint) else load(model)
        classifier = classifier_of(given, labels, templates, classifier, device=device, compute_type=compute_type)
    elif labels is not None or templates is not None:
        raise UsageError("classify: labels and templates are the classifier's own, and are not given beside it")
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
    """Of labels, or of a file of `save_classifier`, on a device in a compute type (`prepare_for_inference`)."""
    if (labels is None) == (file is None):
        raise UsageError("labels: give either labels or a classifier")
    if file is not None and not isinstance(file, str | Path):
        raise UsageError(f"classifier: expected a path ({shown(file)})")
    if file is not None and templates is not None:
        raise UsageError("templates: a classifier has its own")
    check_clip(checkpoint)
    if file is None:
        return ZeroShotClassifier(prepare_for_inference(checkpoint, compute_type, device), labels, templates)
    from multimodal.tasks.encode.features import model_digest

    digest = model_digest(checkpoint)
    return load_classifier(Path(file), prepare_for_inference(checkpoint, compute_type, device), digest)
