"""Zero-shot accuracy: each picture's class among the names of all, as CLIP_benchmark measures it (unit vectors, their
mean over the templates, made a unit vector again; scaled cosines)."""

from collections.abc import Mapping

from multimodal.data.datasets.image_sets import PictureSet
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.features import Features
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores


def zero_shot_scores(
    classifier: ZeroShotClassifier, pictures: PictureSet, found: Features, numbers: Mapping[str, int]
) -> ClassScores:
    """`numbers`: the place of each class id among the labels of the classifier. Probabilities could round to ties, so
    logits are compared, as a calibration maps them. Raises DataError for a classifier of one label."""
    logits, calibration = classifier.vector_logits(found.vectors), classifier.calibration
    if calibration is not None:
        logits = calibration.unbounded(logits)
    return class_scores(classifier.labels, pictures.labels(found.keys, dict(numbers)), logits)
