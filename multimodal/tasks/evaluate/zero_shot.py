"""Zero-shot accuracy of a CLIP model: image embeddings against class embeddings, averaged over prompt templates.

The protocol is that of CLIP_benchmark: unit vectors, their mean over the templates normalized again, scaled cosines."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.datasets.class_names import class_names, evenly
from multimodal.data.datasets.image_sets import ClassNames, ImageSet, labelled, named_classes, open_images
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns
from multimodal.errors import UsageError
from multimodal.inference.modules import inference_mode
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.features import Features, image_features
from multimodal.tasks.evaluate.class_scores import ClassScores, class_scores
from multimodal.tasks.evaluate.scores import top_shares
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)

LEVELS = 3  # hypernyms that describe a class which the model has never seen named
WEIGHT = 0.5  # of their vector; that of the name has 1


@inference_mode()
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


@inference_mode()
def described(classifier: ZeroShotClassifier, above: Mapping[str, Sequence[str]], levels: int) -> ZeroShotClassifier:
    """A copy that knows each label also by its `levels` nearest hypernyms: to the vector of the label comes, with half
    of its weight, the mean of theirs. A label without hypernyms stays as it is. Raises UsageError where none has any.

    A name that the model has never read says little to it, and those of larger groups more."""
    terms = [tuple(dict.fromkeys(map(str.strip, islice(above.get(label, ()), levels)))) for label in classifier.labels]
    places = {term: place for place, term in enumerate(dict.fromkeys(term for own in terms for term in own))}
    if not places:
        raise UsageError("needs class names with hypernyms, and these have none", argument="hypernyms")
    vectors, weights = ZeroShotClassifier(classifier.checkpoint, list(places), classifier.templates).weights, []
    for own, name in zip(terms, classifier.weights, strict=True):
        mean = vectors[[places[term] for term in own]].mean(0) if own else torch.zeros_like(name)
        weights.append(name + WEIGHT * F.normalize(mean, dim=0))
    return ZeroShotClassifier(
        classifier.checkpoint, classifier.labels, classifier.templates, weights=F.normalize(torch.stack(weights), dim=1)
    )


class NamedImages(NamedTuple):
    """Labelled images with the names of all classes of their source."""

    images: ImageSet
    classes: ClassNames


def read_named(
    source: str | Path, classes: Sequence[Path], count: int | None = None, columns: ListColumns = USUAL,
    trust: Trust = OWN_FOLDER,
) -> NamedImages:  # fmt: skip
    """At most `count` images, evenly spread over the source. `classes`: files of class names by id."""
    images = labelled(open_images(source, count, trust, columns))
    return NamedImages(images, named_classes(images, class_names(classes, [source])))


def vectors(checkpoint: Checkpoint, named: NamedImages) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N"]]:
    """Vectors and labels of the readable images; the others are logged."""
    features = image_features(checkpoint, named.images, batch_size=100)
    for cause in features.broken:
        log.warning("broken item skipped: %s", cause)
    return features.vectors, named.images.labels(features.keys, named.classes.numbers)


def examples(checkpoint: Checkpoint, named: NamedImages) -> list[str]:
    """Label and top-3 predictions of ten images."""
    few = replace(named.images, keys=list(evenly(named.images.keys, 10)))
    shown, labels = vectors(checkpoint, named._replace(images=few))
    names = named.classes.names
    scores = ZeroShotClassifier(checkpoint, names).vector_logits(shown)
    rows = zip(labels.tolist(), scores.topk(min(3, len(names))).indices.tolist(), strict=True)
    return [f"{names[label]} | {', '.join(names[i] for i in best)}" for label, best in rows]


def accuracy(checkpoint: Checkpoint, named: NamedImages) -> dict[str, float]:
    """Top-1 and top-5 among the names of all classes, with the templates of the checkpoint's card.

    Where the card lists `held_out` class names, also for the images of those: among all names (`unseen_top1`), among
    the unseen names only (`unseen_apart_top1`), and among these with their hypernyms (`unseen_described_top1`; see
    `described`)."""
    shown, labels = vectors(checkpoint, named)
    classifier = ZeroShotClassifier(checkpoint, named.classes.names)
    scores = classifier.vector_logits(shown)
    figures = top_shares(scores, labels)
    unseen = torch.tensor([name in checkpoint.card.get("held_out", ()) for name in named.classes.names])
    rows = unseen[labels]
    if not rows.any():
        return figures
    kinds = {"unseen": (scores[rows], labels[rows])}
    among = (unseen.cumsum(0) - 1)[labels[rows]]
    kinds["unseen_apart"] = scores[rows][:, unseen], among
    if any(named.classes.above.values()):
        more = described(classifier, named.classes.above, LEVELS).vector_logits(shown[rows])
        kinds["unseen_described"] = more[:, unseen], among
    return figures | {
        f"{kind}_{name}": share for kind, own in kinds.items() for name, share in top_shares(*own).items()
    }
