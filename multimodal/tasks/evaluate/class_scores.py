"""Classification metrics: accuracies, recall by class, confusions."""

import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import DataError
from multimodal.tasks.evaluate.scores import ranks

MOST_CONFUSED = 20  # pairs of classes that a report names


class Mistake(NamedTuple):
    """An item by its number, its class and the class it was taken for, each with its score."""

    item: int
    label: str
    label_score: float
    found: str
    found_score: float


@dataclass(frozen=True)
class ClassScores:
    """Target class, number of other classes that scored as high or higher, and predicted class of N items; `shares`:
    the probabilities, or other scores, of the target and of the predicted class; `items`: what they are.

    Where the class of an image ties with another, that other is found (see `scores.ranks`)."""

    names: list[str]
    labels: Int[Tensor, "N"]
    ranks: Int[Tensor, "N"]
    found: Int[Tensor, "N"]
    shares: Float[Tensor, "N 2"]
    items: str = "images"

    def figures(self) -> dict[str, Any]:
        """`acc1`, `acc5` (None for fewer than five classes), `mean_per_class_recall` (over the classes that have
        images, as CLIP_benchmark takes it), and the counts."""
        shown = [row["recall"] for row in self.classes() if row[self.items]]
        return {
            "acc1": _share(self.ranks < 1), "acc5": _share(self.ranks < 5) if len(self.names) >= 5 else None,
            "mean_per_class_recall": statistics.fmean(shown), self.items: len(self.labels),
            "classes": len(self.names), f"classes_with_{self.items}": len(shown),
        }  # fmt: skip

    def confusion(self) -> Int[Tensor, "C C"]:
        """Confusion matrix: images of the row's class predicted as the column's class."""
        count = len(self.names)
        return torch.bincount(self.labels * count + self.found, minlength=count * count).view(count, count)

    def classes(self) -> list[dict[str, Any]]:
        """A row a class: its images, the share of them that was found (None without images), and how many
        images were taken for it."""
        table = self.confusion()
        hits, images, taken = (x.tolist() for x in (table.diag(), table.sum(1), table.sum(0)))
        return [
            {"class": name, self.items: n, "recall": hit / n if n else None, "found": m}
            for name, n, hit, m in zip(self.names, images, hits, taken, strict=True)
        ]

    def confused(self) -> list[dict[str, Any]]:
        """The most frequent mistakes."""
        table = self.confusion().fill_diagonal_(0)
        order = table.flatten().argsort(descending=True, stable=True)[:MOST_CONFUSED].tolist()
        pairs = [divmod(place, len(self.names)) for place in order]
        return [
            {"class": self.names[a], "taken_for": self.names[b], self.items: int(table[a, b])}
            for a, b in pairs if table[a, b]
        ]  # fmt: skip

    def mistakes(self, most: int) -> list[Mistake]:
        """The most confident ones first."""
        wrong = (self.ranks > 0).nonzero().flatten()
        order = self.shares[wrong, 1].nan_to_num().argsort(descending=True, stable=True)[:most]
        return [
            Mistake(item, self.names[self.labels[item]], own, self.names[self.found[item]], other)
            for item, (own, other) in zip(wrong[order].tolist(), self.shares[wrong[order]].tolist(), strict=True)
        ]


def class_scores(
    names: list[str], labels: Int[Tensor, "N"], scores: Float[Tensor, "N C"],
    shares: Float[Tensor, "N C"] | None = None, items: str = "images",
) -> ClassScores:  # fmt: skip
    """`shares`: what to show for each class, by default the softmax of `scores`. Raises DataError for fewer than two
    classes."""
    if len(names) < 2:
        raise DataError(f"the class {names[0]!r} alone: all {items} would be right, so two are needed")
    place = ranks(scores, labels)
    others = scores.scatter(1, labels[:, None], -torch.inf).argmax(1)
    found = torch.where(place < 1, labels, others)
    shares = scores.softmax(-1) if shares is None else shares
    return ClassScores(names, labels, place, found, shares.gather(1, torch.stack([labels, found], 1)), items)


def _share(hits: Tensor) -> float:
    return hits.double().mean().item()
