"""Pictures of a data source to measure a model on: which are taken, their classes, and what these are called."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from multimodal.data.datasets.class_names import Concept, class_labels, evenly
from multimodal.data.datasets.images import named_concept
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import Source, open_source
from multimodal.errors import DataError, UsageError


@dataclass(frozen=True)
class PictureSet:
    """`keys`: the items taken. `ids`: class ids of the whole source, in the order of their first item. `broken`: the
    items that cannot be used, and why."""

    where: str
    source: Source
    keys: list[int]
    ids: list[str]
    broken: list[str]

    def labels(self, keys: Sequence[int], numbers: dict[str, int]) -> Int[Tensor, "N"]:
        """The number of the class of each of these items."""
        return torch.tensor([numbers[self.source.row(key).label] for key in keys], dtype=torch.long)


@dataclass(frozen=True)
class Captioned:
    """Pictures and what people wrote about each. `pictures.keys`: an item for each picture."""

    pictures: PictureSet
    texts: dict[int, list[str]]

    def place(self, key: int) -> str:
        """Where the item lies, such as a line of a list."""
        return self.pictures.source.name(key)

    def name(self, key: int) -> str:
        """Of the picture."""
        return self.pictures.source.row(key).name


@dataclass(frozen=True)
class Classes:
    """Names of classes, and the number of each class id of a set among them. Several ids may share a name."""

    names: list[str]
    numbers: dict[str, int]


def open_pictures(
    data: str | Path | Sequence[str | Path], count: int | None = None, trust: Trust = OWN_FOLDER
) -> PictureSet:
    """What `open_source` takes; at most `count` of the items, evenly spread. Raises DataError."""
    parts = [data] if isinstance(data, str | Path) else list(data)
    if not parts or not all(map(str, parts)):  # '' would be the working directory
        raise DataError(f"data {parts}: names no pictures")
    source = open_source(parts, trust=trust)
    taken = evenly(range(len(source)), count)
    rows = {key: source.row(key) for key in taken}
    broken = [f"{row.place}: {row.fault}" for row in rows.values() if row.fault]
    labels = dict.fromkeys(source.row(key).label for key in range(len(source)))
    ids = [label for label in labels if label is not None]
    return PictureSet(", ".join(map(str, parts)), source, [k for k in taken if not rows[k].fault], ids, broken)


def labelled(pictures: PictureSet, least: int = 1) -> PictureSet:
    """The set itself. Raises DataError where its items have no classes, or fewer than `least`."""
    class_labels(pictures.source, pictures.where, least)
    return pictures


def captioned(pictures: PictureSet, count: int | None = None) -> Captioned:
    """Those with captions, at most `count` of them, evenly spread; a picture with an empty one is broken. A list may
    have a line for each text: lines of the same file are one picture. Raises DataError where no item has captions."""
    rows = {key: pictures.source.row(key) for key in pictures.keys}
    if rows and not any(row.texts for row in rows.values()):
        raise DataError(f"{pictures.where}: its items have no captions (a text or captions column, or .txt members)")
    whole = {key: row for key, row in rows.items() if row.texts and all(text.strip() for text in row.texts)}
    place = pictures.source.name
    empty = [f"{place(key)}: {'a caption is empty' if row.texts else 'no caption'}" for key, row in rows.items()
             if key not in whole]  # fmt: skip
    texts: dict[int, list[str]] = {}
    first: dict[str, int] = {}
    for key, row in whole.items():
        texts.setdefault(first.setdefault(json.dumps(row.media), key), []).extend(row.texts)
    keys = list(evenly(list(texts), count))
    known = replace(pictures, keys=keys, broken=[*pictures.broken, *empty])
    return Captioned(known, {key: texts[key] for key in keys})


def named_classes(pictures: PictureSet, known: Mapping[str, Concept]) -> Classes:
    """Each class by the first name that is known for its id (see `class_names`), else by the id itself. Ids of the same
    name count as one class, with a warning. Raises UsageError for an id, such as a number, that is no name."""
    found = {identity: concept.names[0].strip() for identity, concept in _concepts(pictures, known).items()}
    names = list(dict.fromkeys(found.values()))
    if len(names) < len(found):
        owner = {name: identity for identity, name in reversed(found.items())}
        identity, name = next((i, n) for i, n in found.items() if owner[n] != i)
        warnings.warn(f"classes {owner[name]} and {identity} are both called {name!r} and count as one", stacklevel=2)
    return Classes(names, {identity: names.index(name) for identity, name in found.items()})


def listed_classes(
    pictures: PictureSet, known: Mapping[str, Concept], labels: Sequence[str], where: str, by_place: bool = True
) -> Classes:
    """Each class by its place in a list of labels, all of which are answers to choose from: the label that is one of
    its names, its id, or its id with spaces for underscores, in letters of either case.

    With `by_place`, where no class is spelt so: for ids that are whole numbers the label at this place from 0; else,
    for as many labels as classes, that at the place of the id among the sorted ids, as torchvision numbers folders.
    Raises UsageError for a list that fits in none of these ways."""
    places = {label.casefold(): number for number, label in reversed(list(enumerate(labels)))}
    found: dict[str, int] = {}
    for identity in pictures.ids:
        names = (*(known[identity].names if identity in known else ()), identity, identity.replace("_", " "))
        if spelt := [name.casefold() for name in names if name.casefold() in places]:
            found[identity] = places[spelt[0]]
    if not found and by_place and all(identity.isdecimal() for identity in pictures.ids):
        found = {identity: int(identity) for identity in pictures.ids if int(identity) < len(labels)}
    elif not found and by_place and len(labels) == len(pictures.ids):
        found = {identity: number for number, identity in enumerate(sorted(pictures.ids))}
    if unknown := [identity for identity in pictures.ids if identity not in found]:
        raise UsageError(
            f"{where}: none of its {len(labels)} labels is for the class {unknown[0]!r} of {pictures.where} "
            f"({len(unknown)} of {len(pictures.ids)} classes have none)"
        )
    return Classes(list(labels), found)


def _concepts(pictures: PictureSet, known: Mapping[str, Concept]) -> dict[str, Concept]:
    source = pictures.source
    rows = {(row := source.row(key)).label: row for key in reversed(range(len(source)))}
    return {identity: named_concept(rows[identity], known) for identity in pictures.ids}


def same_classes(train: PictureSet, test: PictureSet) -> list[str]:
    """Class ids of a training set, sorted. Raises DataError for a test set that has others."""
    known = class_labels(train.source, train.where)
    if other := sorted(set(class_labels(test.source, test.where, 1)) - set(known)):
        raise DataError(f"{test.where}: has the class {other[0]!r}, which the training set {train.where} lacks")
    return list(known)
