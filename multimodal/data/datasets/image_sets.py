"""Evaluation sets of images: items, classes and class names."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from multimodal.data.datasets.class_names import Concept, class_labels, evenly
from multimodal.data.datasets.images import named_concept
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns, Source, open_source
from multimodal.errors import DataError, UsageError

SHOWN = 3  # pairs of class and label in a warning


@dataclass(frozen=True)
class ImageSet:
    """`keys`: the items used. `ids`: class ids of the whole source, in order of appearance. `broken`: unusable items,
    each with its cause."""

    where: str
    source: Source
    keys: list[int]
    ids: list[str]
    broken: list[str]

    def labels(self, keys: Sequence[int], numbers: dict[str, int]) -> Int[Tensor, "N"]:
        """Return the class numbers of the items."""
        return torch.tensor([numbers[self.source.row(key).label] for key in keys], dtype=torch.long)


@dataclass(frozen=True)
class CaptionedImages:
    """Images and what people wrote about each. `images.keys`: an item for each image."""

    images: ImageSet
    texts: dict[int, list[str]]

    def name(self, key: int) -> str:
        """Return the image's name."""
        return self.images.source.row(key).name


@dataclass(frozen=True)
class ClassNames:
    """Class names, and the number of each class id among them. Several ids may share a name. `above`: hypernyms of a
    name, from near to far."""

    names: list[str]
    numbers: dict[str, int]
    above: Mapping[str, Sequence[str]] = field(default_factory=dict)


def open_images(
    data: str | Path | Sequence[str | Path], count: int | None = None, trust: Trust = OWN_FOLDER,
    columns: ListColumns = USUAL,
) -> ImageSet:  # fmt: skip
    """Open anything that `open_source` reads, with at most `count` items, evenly spread. Raises DataError."""
    parts = [data] if isinstance(data, str | Path) else list(data)
    if not parts or not all(map(str, parts)):  # '' would be the working directory
        raise DataError(f"data {parts}: names no images")
    source = open_source(parts, columns=columns, trust=trust)
    taken = evenly(range(len(source)), count)
    rows = {key: source.row(key) for key in taken}
    broken = [f"{row.place}: {row.fault}" for row in rows.values() if row.fault]
    labels = dict.fromkeys(source.row(key).label for key in range(len(source)))
    ids = [label for label in labels if label is not None]
    return ImageSet(", ".join(map(str, parts)), source, [k for k in taken if not rows[k].fault], ids, broken)


def labelled(images: ImageSet) -> ImageSet:
    """Return the set. Raises DataError if its items have no classes."""
    class_labels(images.source, images.where, 1)
    return images


def captioned(images: ImageSet, count: int | None = None) -> CaptionedImages:
    """Examples with captions, at most `count` of them, evenly spread; an image with an empty one is broken. A list may
    have a line for each text: lines of the same file are one image. Raises DataError where no item has captions."""
    rows = {key: images.source.row(key) for key in images.keys}
    if rows and not any(row.texts for row in rows.values()):
        raise DataError(f"{images.where}: its items have no captions (a text or captions column, or .txt members)")
    whole = {key: row for key, row in rows.items() if row.texts and all(text.strip() for text in row.texts)}
    place = images.source.name
    empty = [f"{place(key)}: {'a caption is empty' if row.texts else 'no caption'}" for key, row in rows.items()
             if key not in whole]  # fmt: skip
    texts: dict[int, list[str]] = {}
    first: dict[str, int] = {}
    for key, row in whole.items():
        texts.setdefault(first.setdefault(images.source.identity(key), key), []).extend(row.texts)
    keys = list(evenly(list(texts), count))
    known = replace(images, keys=keys, broken=[*images.broken, *empty])
    return CaptionedImages(known, {key: texts[key] for key in keys})


def named_classes(images: ImageSet, known: Mapping[str, Concept]) -> ClassNames:
    """Name each class by the first name known for its id (see `class_names`), else by the id. Ids with the same name
    count as one class, with a warning. Raises UsageError for an id that is not a name, such as a number."""
    concepts = _concepts(images, known)
    found = {identity: concept.names[0].strip() for identity, concept in concepts.items()}
    names = list(dict.fromkeys(found.values()))
    if len(names) < len(found):
        owner = {name: identity for identity, name in reversed(found.items())}
        identity, name = next((i, n) for i, n in found.items() if owner[n] != i)
        warnings.warn(f"classes {owner[name]} and {identity} are both called {name!r} and count as one", stacklevel=2)
    above = {found[identity]: concept.above() for identity, concept in reversed(concepts.items())}
    return ClassNames(names, {identity: names.index(name) for identity, name in found.items()}, above)


def listed_classes(
    images: ImageSet, known: Mapping[str, Concept], labels: Sequence[str], where: str, by_place: bool = True
) -> ClassNames:
    """Find each class in a list of labels, all of which a model may choose: the label that equals one of its names or
    its id, with spaces for underscores, ignoring case.

    With `by_place`, if no class is found by name: ids that are integers are positions from 0; otherwise, with as many
    labels as classes, labels follow the sorted ids, as torchvision numbers folders; warns of either. Raises UsageError
    if neither works."""
    places = {label.casefold(): number for number, label in reversed(list(enumerate(labels)))}
    found: dict[str, int] = {}
    for identity in images.ids:
        names = (*(known[identity].names if identity in known else ()), identity, identity.replace("_", " "))
        if spelt := [name.casefold() for name in names if name.casefold() in places]:
            found[identity] = places[spelt[0]]
    by_place = by_place and not found
    if by_place and all(identity.isdecimal() for identity in images.ids):
        found = {identity: int(identity) for identity in images.ids if int(identity) < len(labels)}
    elif by_place and len(labels) == len(images.ids):
        found = {identity: number for number, identity in enumerate(sorted(images.ids))}
    if unknown := [identity for identity in images.ids if identity not in found]:
        raise UsageError(
            f"{where}: none of its {len(labels)} labels is for the class {unknown[0]!r} of {images.where} "
            f"({len(unknown)} of {len(images.ids)} classes have none)"
        )
    if by_place:
        pairs = [f"{identity} = {labels[number]!r}" for identity, number in islice(found.items(), SHOWN)]
        more = ", …" if len(found) > SHOWN else ""
        warnings.warn(f"{where}: labels are matched to classes by order: {', '.join(pairs)}{more}", stacklevel=2)
    return ClassNames(list(labels), found)


def _concepts(images: ImageSet, known: Mapping[str, Concept]) -> dict[str, Concept]:
    source = images.source
    rows = {(row := source.row(key)).label: row for key in reversed(range(len(source)))}
    return {identity: named_concept(rows[identity], known) for identity in images.ids}


def same_classes(train: ImageSet, test: ImageSet) -> list[str]:
    """Return the sorted class ids of a training set. Raises DataError for a test set with others."""
    known = class_labels(train.source, train.where)
    if other := sorted(set(class_labels(test.source, test.where, 1)) - set(known)):
        raise DataError(f"{test.where}: has the class {other[0]!r}, which the training set {train.where} lacks")
    return list(known)
