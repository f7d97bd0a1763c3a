"""Zero-shot accuracy of a CLIP model: image embeddings against class embeddings, averaged over prompt templates.

The protocol is that of CLIP_benchmark: unit vectors, their mean over the templates normalized again, scaled cosines."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.datasets.class_names import class_names, evenly
from multimodal.data.datasets.image_sets import ClassNames, ImageSet, labelled, named_classes, open_images
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.features import Features, image_features
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores
from multimodal.tasks.evaluate.scores import top_shares
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)


@torch.inference_mode()
def zero_shot_scores(
    classifier: ZeroShotClassifier, images: ImageSet, features: Features, numbers: Mapping[str, int]
) -> ClassScores:
    """`numbers`: the index of each class id among the classifier's labels. Compares (calibrated) logits, since
    probabilities may round to ties. Raises DataError for a classifier of one label."""
    logits, calibration = classifier.vector_logits(features.vectors), classifier.calibration
    shares = classifier.scored(logits.to(classifier.device)).float().cpu()
    if calibration is not None:
        logits = calibration.unbounded(logits)
    return class_scores(classifier.labels, images.labels(features.keys, dict(numbers)), logits, shares)


class NamedImages(NamedTuple):
    """Labelled images with the names of all classes of their source."""

    images: ImageSet
    classes: ClassNames


def read_named(
    source: str | Path, classes: Sequence[Path], count: int | None = None, trust: Trust = OWN_FOLDER
) -> NamedImages:
    """At most `count` images, evenly spread over the source. `classes`: files of class names by id."""
    images = labelled(open_images(source, count, trust))
    return NamedImages(images, named_classes(images, class_names(classes, [source])))


def logits(
    checkpoint: Checkpoint, named: NamedImages, batch_size: int = 100
) -> tuple[Float[Tensor, "N C"], Int[Tensor, "N"]]:
    """Logits and labels of the readable images; the others are logged."""
    features = image_features(checkpoint, named.images, batch_size=batch_size)
    for cause in features.broken:
        log.warning("broken item skipped: %s", cause)
    classifier = ZeroShotClassifier(checkpoint, named.classes.names)
    return classifier.vector_logits(features.vectors), named.images.labels(features.keys, named.classes.numbers)


def examples(checkpoint: Checkpoint, named: NamedImages, count: int = 10) -> list[str]:
    """Label and top-3 predictions of a few images."""
    few = replace(named.images, keys=list(evenly(named.images.keys, count)))
    scores, labels = logits(checkpoint, named._replace(images=few))
    names = named.classes.names
    rows = zip(labels.tolist(), scores.topk(min(3, len(names))).indices.tolist(), strict=True)
    return [f"{names[label]} | {', '.join(names[i] for i in best)}" for label, best in rows]


def accuracy(checkpoint: Checkpoint, named: NamedImages) -> dict[str, float]:
    """Top-1 and top-5 among the names of all classes, with the templates of the checkpoint's card.

    Where the card lists `held_out` class names, also for the images of those: among all names (`unseen_top1`) and
    among the unseen names only (`unseen_apart_top1`)."""
    scores, labels = logits(checkpoint, named)
    figures = top_shares(scores, labels)
    unseen = torch.tensor([name in checkpoint.card.get("held_out", ()) for name in named.classes.names])
    rows = unseen[labels]
    if rows.any():
        apart = top_shares(scores[rows][:, unseen], (unseen.cumsum(0) - 1)[labels[rows]])
        figures |= {f"unseen_{name}": share for name, share in top_shares(scores[rows], labels[rows]).items()}
        figures |= {f"unseen_apart_{name}": share for name, share in apart.items()}
    return figures
