"""The hardest queries of a retrieval, both ways, with what was found in place of the right item."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.data.sources import Source
from multimodal.tasks.evaluate.retrieval import HardQuery, Neighbour, hardest
from multimodal.tasks.report.media import figure, grid, name_line, thumbnails
from multimodal.tasks.report.page import Section, escaped

QUERIES = 12  # of each way
NEAR = 5


class RetrievalItems(NamedTuple):
    """Images (`source.read(keys[i])`) and texts with their vectors; `owners`: the image of each text."""

    source: Source
    keys: Sequence[int]
    image_vectors: Float[Tensor, "N D"]
    texts: Sequence[str]
    text_vectors: Float[Tensor, "M D"]
    owners: Sequence[int]

    def name(self, image: int) -> str:
        return self.source.row(self.keys[image]).name

    def thumbnails(self, images: set[int]) -> dict[int, str]:
        return thumbnails(images, lambda image: self.source.read(self.keys[image]).media)


def neighbour_sections(items: RetrievalItems) -> Iterator[Section]:
    images, texts = torch.arange(len(items.keys)), torch.as_tensor(items.owners)
    vectors = items.image_vectors, items.text_vectors
    if found := hardest(*vectors, images, texts, QUERIES, NEAR):
        yield _of_images(items, found)
    if found := hardest(*vectors[::-1], texts, images, QUERIES, NEAR):
        yield _of_texts(items, found)


def _of_images(items: RetrievalItems, found: list[HardQuery]) -> Section:
    def html() -> str:
        shown = items.thumbnails({one.query for one in found})
        return "\n".join(map(row, found, [shown.get(one.query) for one in found]))

    def row(one: HardQuery, uri: str | None) -> str:
        near = (f"<li value={n.place}>{_mark(n)}{escaped(items.texts[n.item], 400)} <small>{n.score:.3f}</small>"
                for n in one.found)  # fmt: skip
        caption = f"right text at rank {one.rank:,}<br>{name_line(items.name(one.query))}"
        return f"<div class='row pair'>{figure(uri, caption)}<ol>{''.join(near)}</ol></div>"

    lines = [line for one in found for line in (
        f"{items.name(one.query)}: right text at rank {one.rank:,}",
        *(f"  {n.place}. {n.score:.3f} {items.texts[n.item]}{_right(n)}" for n in one.found))]  # fmt: skip
    return Section("Images whose texts are found last", lines=lines, html=html)


def _of_texts(items: RetrievalItems, found: list[HardQuery]) -> Section:
    def html() -> str:
        shown = items.thumbnails({near.item for one in found for near in one.found})
        return "\n".join(row(one, shown) for one in found)

    def row(one: HardQuery, shown: dict[int, str]) -> str:
        captions = (f"{n.place}. {_mark(n)}{n.score:.3f}<br>{name_line(items.name(n.item))}" for n in one.found)
        cards = (figure(shown.get(n.item), caption, n.right) for n, caption in zip(one.found, captions, strict=True))
        text = f"<b>{escaped(items.texts[one.query], 400)}</b> <small>right image at rank {one.rank:,}</small>"
        return f"<div class=row><p>{text}</p>{grid(cards)}</div>"

    lines = [line for one in found for line in (
        f"{items.texts[one.query]}: right image at rank {one.rank:,}",
        *(f"  {n.place}. {n.score:.3f} {items.name(n.item)}{_right(n)}" for n in one.found))]  # fmt: skip
    return Section("Texts whose images are found last", lines=lines, html=html)


def _mark(near: Neighbour) -> str:
    return "<b class=right>✓</b> " if near.right else ""


def _right(near: Neighbour) -> str:
    return "  (right)" if near.right else ""
