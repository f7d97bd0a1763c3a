"""Retrieval of texts by images and of images by texts: at which rank the first right one comes.

The rank of a query is one more than the number of wrong items that do not score lower than its best right one. So a tie
is no hit: a wrong item with the same score comes before. Without ties recall@k is that of CLIP_benchmark: the share of
queries with at least one right item among the first k."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

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


@torch.inference_mode()
def first_ranks(
    queries: Float[Tensor, "N D"], items: Float[Tensor, "M D"], groups: Int[Tensor, "N"], own: Int[Tensor, "M"]
) -> Int[Tensor, "N"]:
    """An item is right where its group is that of the query; each query has one at least. Items that are equal are
    compared once, so that rounding breaks no tie between them."""
    different, places = torch.unique(items, dim=0, return_inverse=True)
    found = []
    for rows, group in zip(*(x.split(max(1, CELLS // len(items))) for x in (queries, groups)), strict=True):
        scores = rows @ items.T if len(different) == len(items) else (rows @ different.T)[:, places]
        right = group[:, None] == own
        best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        found.append(1 + (~(scores < best) & ~right).sum(1))
    return torch.cat(found)
