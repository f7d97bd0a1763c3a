"""Retrieval of texts by images and of images by texts: at which rank the first right one comes.

The rank of a query is one more than the number of wrong items that do not score lower than its best right one. So a tie
is no hit: a wrong item with the same score comes before. Without ties recall@k is that of CLIP_benchmark: the share of
queries with at least one right item among the first k."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.inference.modules import inference_mode

DEPTHS = (1, 5, 10)
CELLS = 1 << 22  # scores that are held at once


@dataclass(frozen=True)
class Retrieval:
    """Ranks from 1: of each image's first own text among all texts, and of each text's own image among all."""

    image_to_text: Int[Tensor, "N"]
    text_to_image: Int[Tensor, "M"]

    def figures(self) -> dict[str, Any]:
        """Both ways recall at 1, 5 and 10 (None where there are fewer to choose from), the median rank and the mean
        reciprocal rank. CLIP_benchmark calls the ways text retrieval and image retrieval."""
        images, texts = len(self.image_to_text), len(self.text_to_image)
        return {
            "images": images, "texts": texts, "image_to_text": rank_figures(self.image_to_text, texts),
            "text_to_image": rank_figures(self.text_to_image, images),
        }  # fmt: skip


def rank_figures(ranks: Int[Tensor, "N"], choices: int) -> dict[str, float | None]:
    exact = ranks.double()
    recalls = {f"recall@{k}": (ranks <= k).double().mean().item() if choices >= k else None for k in DEPTHS}
    return {**recalls, "median_rank": exact.quantile(0.5).item(), "mean_reciprocal_rank": (1 / exact).mean().item()}


def retrieval(images: Float[Tensor, "N D"], texts: Float[Tensor, "M D"], owners: Sequence[int]) -> Retrieval:
    """Retrieval metrics of unit vectors; `owners`: the index of each text's image."""
    of = torch.as_tensor(owners, dtype=torch.long)
    own = torch.arange(len(images))
    return Retrieval(first_ranks(images, texts, own, of), first_ranks(texts, images, of, own))


@inference_mode()
def first_ranks(
    queries: Float[Tensor, "N D"], items: Float[Tensor, "M D"], groups: Int[Tensor, "N"], own: Int[Tensor, "M"]
) -> Int[Tensor, "N"]:
    """An item is right where its group is that of the query; each query has one at least. Items that are equal are
    compared once, so that rounding breaks no tie between them."""
    different, places = torch.unique(items, dim=0, return_inverse=True)
    groups, own, found = groups.to(items.device), own.to(items.device), []
    for rows, group in zip(*(x.split(max(1, CELLS // len(items))) for x in (queries, groups)), strict=True):
        scores = rows @ items.T if len(different) == len(items) else (rows @ different.T)[:, places]
        right = group[:, None] == own
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        found.append(1 + (~(scores < best) & ~right).sum(1))
    return torch.cat(found)


class Neighbour(NamedTuple):
    """An item that a query found at `place`, counted from 1."""

    item: int
    place: int
    score: float
    right: bool


class HardQuery(NamedTuple):
    """A query whose first right item comes late, with what it found instead, and that item last."""

    query: int
    rank: int
    found: list[Neighbour]


@inference_mode()
def hardest(
    queries: Float[Tensor, "N D"], items: Float[Tensor, "M D"], groups: Int[Tensor, "N"], own: Int[Tensor, "M"],
    most: int, near: int,
) -> list[HardQuery]:  # fmt: skip
    """The `most` worst queries, each with its `near` nearest items; arguments as of `first_ranks`."""
    groups, own = groups.to(items.device), own.to(items.device)
    ranks = first_ranks(queries, items, groups, own)
    worst = ranks.argsort(descending=True, stable=True)[:most]
    found = []
    for query in worst[ranks[worst] > 1].tolist():
        scores, order = (items @ queries[query]).sort(descending=True, stable=True)
        right = own[order] == groups[query]
        places = [*range(min(near, len(order)))]
        first = int(right.int().argmax())
        places += [] if first in places else [first]
        rows = [Neighbour(int(order[at]), at + 1, float(scores[at]), bool(right[at])) for at in places]
        found.append(HardQuery(query, int(ranks[query]), rows))
    return found
