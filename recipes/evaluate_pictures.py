"""Zero-shot accuracy of a CLIP, for evaluate.py and train_clip.py; accuracy of a classifier."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.tasks.zeroshot import ZeroShotClassifier
from multimodal.tokens.image import Preprocessing, preprocess, read_image
from multimodal.train.captions import class_names
from multimodal.train.classify import Accuracy
from multimodal.train.pictures import named_concept
from multimodal.train.scores import evenly, top_shares
from multimodal.train.sources import open_source
from multimodal.weights.folder import Checkpoint


@dataclass(frozen=True)
class PictureOptions:
    """Of models of pictures."""

    classes: tuple[Path, ...] = (Path(__file__).with_name("classes.jsonl"),)
    """names of classes by their ids, besides those of a `classes.jsonl` beside the data"""
    pictures: int = 100
    """pictures of a batch"""


class Labelled(NamedTuple):
    """Pictures (paths or bytes), their labels [N], and the class names which these index."""

    pictures: list[Path | bytes]
    labels: Tensor
    names: list[str]

    def batches(self, size: int, record: Preprocessing) -> Iterator[Tensor]:
        for start in range(0, len(self.pictures), size):
            part = self.pictures[start : start + size]
            yield torch.stack([preprocess(read_image(picture), record) for picture in part])


def read_labelled(source: str | Path, classes: Sequence[Path], count: int | None = None) -> Labelled:
    """All pictures of a source or about `count` evenly spread ones, but the names of all classes."""
    items, known = open_source(source), class_names(classes, [source])
    found = [named_concept(items.row(key), known).names[0] for key in range(len(items))]
    names = list(dict.fromkeys(found))
    picked = range(0, len(items), max(1, len(items) // count) if count else 1)
    labels = torch.tensor([names.index(found[key]) for key in picked])
    return Labelled([items.read(key).media for key in picked], labels, names)


@torch.inference_mode()
def cosines(checkpoint: Checkpoint, labelled: Labelled, size: int = 100) -> Tensor:
    """Of all pictures with all names [N C]."""
    classifier = ZeroShotClassifier(checkpoint, labelled.names)
    device = next(checkpoint.model.parameters()).device
    batches = labelled.batches(size, checkpoint.preprocessing)
    found = [checkpoint.model.encode_image(part.to(device)) @ classifier.weights.T for part in batches]
    return torch.cat(found).cpu().float()


def examples(checkpoint: Checkpoint, labelled: Labelled, count: int = 10) -> list[str]:
    """Label and the first three names found, of a few pictures."""
    keys = list(evenly(range(len(labelled.labels)), count))
    few = Labelled([labelled.pictures[key] for key in keys], labelled.labels[keys], labelled.names)
    rows = zip(few.labels.tolist(), cosines(checkpoint, few).topk(min(3, len(few.names))).indices.tolist(), strict=True)
    return [f"{few.names[label]} | {', '.join(few.names[i] for i in best)}" for label, best in rows]


def accuracy(checkpoint: Checkpoint, labelled: Labelled, size: int = 100) -> dict[str, float]:
    """Top-1 and top-5 among the names of all classes of the set, with the templates of the checkpoint's card.

    Where the card has `held_out`, names that were not trained on: also of their pictures, among all names
    (`unseen_top1`) and among the unseen names only (`unseen_apart_top1`)."""
    scores = cosines(checkpoint, labelled, size)
    figures = {"pictures": len(labelled.labels), "classes": len(labelled.names)} | top_shares(scores, labelled.labels)
    held = torch.tensor([name in checkpoint.card.get("held_out", ()) for name in labelled.names])
    own = held[labelled.labels]
    if own.any():
        apart = top_shares(scores[own][:, held], (held.cumsum(0) - 1)[labelled.labels[own]])
        figures |= {"unseen_pictures": int(own.sum()), "unseen_classes": int(held.sum())}
        figures |= {f"unseen_{name}": share for name, share in top_shares(scores[own], labelled.labels[own]).items()}
        figures |= {f"unseen_apart_{name}": share for name, share in apart.items()}
    return figures


def zero_shot(checkpoint: Checkpoint, path: str, options: PictureOptions, count: int | None) -> dict[str, Any]:
    return accuracy(checkpoint, read_labelled(path, options.classes, count), options.pictures)


def classes(checkpoint: Checkpoint, path: str, options: PictureOptions, count: int | None) -> dict[str, Any]:
    """Top-1 and top-5 of a ViT with a head, among all its classes. Raises CheckpointError where its card does not say
    which they are, DataError for a set with others."""
    labels = checkpoint.card.get("labels")
    if not labels or checkpoint.preprocessing is None:
        raise CheckpointError(f"{checkpoint.source}: its classes or its preprocessing are not known (card: labels)")
    measure = Accuracy(open_source(path), labels, checkpoint.preprocessing, path, count, options.pictures)
    return {"pictures": len(measure.keys), "classes": len(labels)} | measure(checkpoint.model)
