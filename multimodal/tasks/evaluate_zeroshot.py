"""Zero-shot accuracy: each picture's class among the names of all, as CLIP_benchmark measures it (unit vectors, their
mean over the templates, made a unit vector again; scaled cosines)."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.tasks.class_scores import ClassScores, class_scores
from multimodal.tasks.features import Features
from multimodal.tasks.picture_sets import PictureSet
from multimodal.tasks.zeroshot import ZeroShotClassifier

ROWS = 4096  # pictures that are compared at once


@torch.inference_mode()
def zero_shot_logits(classifier: ZeroShotClassifier, vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
    """Of `embedding` features; in float32 on the CPU."""
    weights = classifier.weights
    parts = vectors.split(ROWS)
    return torch.cat([classifier.model.logits(part.to(weights), weights).float().cpu() for part in parts])


def zero_shot_scores(
    classifier: ZeroShotClassifier, pictures: PictureSet, found: Features, numbers: Mapping[str, int]
) -> ClassScores:
    """`numbers`: the place of each class id among the labels of the classifier. Probabilities could round to ties, so
    logits are compared, as a calibration maps them. Raises DataError for a classifier of one label."""
    logits, calibration = zero_shot_logits(classifier, found.vectors), classifier.calibration
    if calibration is not None:
        logits = calibration.unbounded(logits)
    return class_scores(classifier.labels, pictures.labels(found.keys, dict(numbers)), logits)
