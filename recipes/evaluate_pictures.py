"""Zero-shot accuracy of a CLIP, for evaluate.py and train_clip.py; accuracy of a classifier."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.datasets.class_names import class_names, evenly
from multimodal.data.datasets.image_sets import Classes, PictureSet, labelled, named_classes, open_pictures
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import open_source
from multimodal.errors import CheckpointError
from multimodal.tasks.classify.classifier import ZeroShotClassifier
from multimodal.tasks.encode.features import picture_features
from multimodal.tasks.evaluate.scores import top_shares
from multimodal.train.objectives.classify import Accuracy
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PictureOptions:
    """Of models of pictures."""

    classes: tuple[Path, ...] = (Path(__file__).with_name("classes.jsonl"),)
    """names of classes by their ids, besides those of a `classes.jsonl` beside the data"""
    pictures: int = 100
    """pictures of a batch"""


class Labelled(NamedTuple):
    """Pictures of a source, and the names of all its classes."""

    pictures: PictureSet
    classes: Classes


def read_labelled(
    source: str | Path, classes: Sequence[Path], count: int | None = None, trust: Trust = OWN_FOLDER
) -> Labelled:
    """All pictures of a source or at most `count` evenly spread ones, but the names of all classes."""
    pictures = labelled(open_pictures(source, count, trust))
    return Labelled(pictures, named_classes(pictures, class_names(classes, [source])))


def logits(
    checkpoint: Checkpoint, labelled: Labelled, size: int = 100
) -> tuple[Float[Tensor, "N C"], Int[Tensor, "N"]]:
    """Of the pictures that can be read with all names, and the numbers of their own."""
    found = picture_features(checkpoint, labelled.pictures, batch_size=size)
    for cause in found.broken:
        log.warning("broken item left out: %s", cause)
    classifier = ZeroShotClassifier(checkpoint, labelled.classes.names)
    labels = labelled.pictures.labels(found.keys, labelled.classes.numbers)
    return classifier.vector_logits(found.vectors), labels


def examples(checkpoint: Checkpoint, labelled: Labelled, count: int = 10) -> list[str]:
    """Label and the first three names found, of a few pictures."""
    few = replace(labelled.pictures, keys=list(evenly(labelled.pictures.keys, count)))
    scores, labels = logits(checkpoint, labelled._replace(pictures=few))
    names = labelled.classes.names
    rows = zip(labels.tolist(), scores.topk(min(3, len(names))).indices.tolist(), strict=True)
    return [f"{names[label]} | {', '.join(names[i] for i in best)}" for label, best in rows]


def accuracy(checkpoint: Checkpoint, labelled: Labelled, size: int = 100) -> dict[str, float]:
    """Top-1 and top-5 among the names of all classes of the set, with the templates of the checkpoint's card.

    Where the card has `held_out`, names that were not trained on: also of their pictures, among all names
    (`unseen_top1`) and among the unseen names only (`unseen_apart_top1`)."""
    scores, labels = logits(checkpoint, labelled, size)
    names = labelled.classes.names
    figures = {"pictures": len(labels), "classes": len(names)} | top_shares(scores, labels)
    held = torch.tensor([name in checkpoint.card.get("held_out", ()) for name in names])
    own = held[labels]
    if own.any():
        apart = top_shares(scores[own][:, held], (held.cumsum(0) - 1)[labels[own]])
        figures |= {"unseen_pictures": int(own.sum()), "unseen_classes": int(held.sum())}
        figures |= {f"unseen_{name}": share for name, share in top_shares(scores[own], labels[own]).items()}
        figures |= {f"unseen_apart_{name}": share for name, share in apart.items()}
    return figures


def zero_shot(
    checkpoint: Checkpoint, path: str, options: PictureOptions, count: int | None, trust: Trust = OWN_FOLDER
) -> dict[str, Any]:
    return accuracy(checkpoint, read_labelled(path, options.classes, count, trust), options.pictures)


def classes(
    checkpoint: Checkpoint, path: str, options: PictureOptions, count: int | None, trust: Trust = OWN_FOLDER
) -> dict[str, Any]:
    """Top-1 and top-5 of a ViT with a head, among all its classes. Raises CheckpointError where its card does not say
    which they are, DataError for a set with others."""
    labels = checkpoint.card.get("labels")
    if not labels or checkpoint.preprocessing is None:
        raise CheckpointError(f"{checkpoint.source}: its classes or its preprocessing are not known (card: labels)")
    measure = Accuracy(open_source(path, trust=trust), labels, checkpoint.preprocessing, path, count, options.pictures)
    return {"pictures": len(measure.keys), "classes": len(labels)} | measure(checkpoint.model)
