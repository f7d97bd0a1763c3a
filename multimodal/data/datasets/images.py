"""Images for contrastive training: numbered by concept, decoded once, augmented as batches."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageOps
from torch import Tensor

from multimodal.data.datasets.class_names import Concept, held_out, speaks_of
from multimodal.data.remote.trust import OWN_FOLDER, Trust
from multimodal.data.sources import USUAL, ListColumns, SourceRow, joined, open_source
from multimodal.errors import DataError, UsageError
from multimodal.tokens.image import exact_resize
from multimodal.tokens.image.exact_resize import Cut
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.image.resampling import mean_and_deviation

BROKEN = -1  # concept number of an item that raises on reading
LUMA = (0.299, 0.587, 0.114)
DRAWS = 12  # random numbers in [0, 1) per image for crop and colours


class ConceptImages(NamedTuple):
    """Concepts, and for each image its place in the sources and its concept number. `held`: those that are held out."""

    concepts: list[Concept]
    places: list[int]
    groups: list[int]
    held: list[Concept]


class DecodedImages:
    """Cache of decoded images, up to `most` megabytes, in memory that forked workers share."""

    def __init__(self, count: int, side: int, most: int):
        slot = 3 * side * side
        self.slots = min(count, most * 1_000_000 // slot)
        if self.slots:
            # anonymous: not bounded by /dev/shm; unwritten pages take no memory
            self.pixels = torch.frombuffer(mmap.mmap(-1, self.slots * slot), dtype=torch.uint8).view(-1, slot)
            self.sides = torch.frombuffer(mmap.mmap(-1, self.slots * 2), dtype=torch.int16)

    def get(self, key: int, decode: Callable[[int], Tensor]) -> UInt8[Tensor, "3 S S"]:
        if key >= self.slots:
            return decode(key)
        if not (side := int(self.sides[key])):
            pixels = decode(key)
            side = pixels.shape[-1]
            self.pixels[key, : pixels.numel()] = pixels.flatten()
            self.sides[key] = side  # after the pixels: another worker may read
        return self.pixels[key, : 3 * side * side].view(3, side, side)


class LabelledImageSource:
    """A `loader.Source` of (square, concept number) over anything that `open_source` reads.

    An image's concept is its captions, if any, else its class: the concept of its label in `classes`, or the label.
    `hold_out`: share of the classes of each source to leave out (see `held_out`), with captions that mention them.
    `side`: pixels of the model's images; smaller images are stored as squares of 2/3 of that side, others of 7/6.
    `cache`: megabytes of decoded images. `times`: how often an epoch holds each source (by default once).

    Raises UsageError for a label that is not a word and not in `classes`, DataError for an unreadable source."""

    def __init__(
        self, data: Sequence[str], classes: Mapping[str, Concept], side: int, hold_out: float = 0.0, cache: int = 0,
        columns: ListColumns = USUAL, trust: Trust = OWN_FOLDER, times: Sequence[int] = (),
    ):  # fmt: skip
        sources = [open_source(part, columns=columns, trust=trust) for part in data]
        self.items, self.small, self.large = joined(sources), side * 2 // 3, side * 7 // 6
        rows = [[source.row(key) for key in range(len(source))] for source in sources]
        self.concepts, self.places, self.groups, self.held = _named(rows, times or [1] * len(rows), classes, hold_out)
        self.squares = DecodedImages(len(self.items), self.large, cache)

    def __len__(self) -> int:
        return len(self.places)

    def name(self, key: int) -> str:
        return self.items.name(self.places[key])

    def read(self, key: int) -> tuple[UInt8[Tensor, "3 S S"], int]:
        """Raises ImageError or DataError for a broken image."""
        if self.groups[key] == BROKEN:
            row = self.items.row(self.places[key])
            raise DataError(f"{row.place}: {row.fault or 'its caption is empty'}")
        return self.squares.get(self.places[key], self._decoded), self.groups[key]

    def _decoded(self, place: int) -> UInt8[Tensor, "3 S S"]:
        sample = self.items.read(place)
        image = read_image(sample.media, least=self.large)
        return square(image, self.small if min(image.size) <= self.small else self.large)


def _named(
    rows: Sequence[Sequence[SourceRow]], times: Sequence[int], classes: Mapping[str, Concept], hold_out: float
) -> ConceptImages:
    sets = [{r.label: named_concept(r, classes) for r in own if r.label is not None and not r.texts} for own in rows]
    held = held_out(sets, hold_out)
    trained = {label: concept for one in sets for label, concept in one.items() if label not in held}
    numbers = {label: number for number, label in enumerate(trained)}
    written: dict[tuple[str, ...], int] = {}  # images with the same captions match each other's
    named = ConceptImages([*trained.values()], [], [], sorted(held.values(), key=lambda concept: concept.names))
    often = chain(*([count] * len(own) for count, own in zip(times, rows, strict=True)))
    for place, (row, count) in enumerate(zip(chain(*rows), often, strict=True)):
        number = numbers.get(row.label)
        captions = [clean for text in row.texts if (clean := text.removesuffix(" .").strip())]
        if row.fault or (row.texts and not captions):
            number = BROKEN
        elif row.texts:
            known = tuple(caption for caption in captions if not speaks_of(caption, held.values()))
            number = written.setdefault(known, len(named.concepts)) if known else None
            named.concepts.extend([Concept(known, whole=True)] if number == len(named.concepts) else [])
        elif row.label is None:
            raise DataError(f"{row.place}: has neither a class nor a caption")
        if number is not None:
            named.places.extend([place] * count)
            named.groups.extend([number] * count)
    return named


def named_concept(row: SourceRow, classes: Mapping[str, Concept]) -> Concept:
    """Return the concept of a labelled item. Raises DataError for an item without a label, UsageError for a label that
    is not a name, such as a number."""
    if row.label is None:
        raise DataError(f"{row.place}: {row.fault or 'has no class'}")
    if row.label in classes:
        return classes[row.label]
    letters = [letter for letter in row.label if letter.isalpha()]
    if len(letters) < 2 and all(map(str.isascii, letters)):  # one Chinese character may be a word
        raise UsageError(f"{row.place}: is of class {row.label!r}, an id that classes do not name")
    return Concept((row.label.replace("_", " "),))


def square(image: Image.Image, size: int) -> UInt8[Tensor, "3 S S"]:
    """Resize the central square to `size` pixels per side, as `ImageOps.fit` does."""
    same = image.size == (size, size)
    if same or (resize := exact_resize.compiled.get()) is None:
        fitted = image if same else ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()
    side, made = min(image.size), np.empty((3, size, size), np.uint8)
    left, top = ((edge - side) / 2 for edge in image.size)
    cut = Cut((size, size), (0, 0, size, size), (left, top, left + side, top + side))
    resize(np.asarray(image), cut, "bicubic", None, made)
    return torch.from_numpy(made)


def augment(
    pixels: UInt8[Tensor, "B 3 S S"], draws: Float[Tensor, "B n"], soft: Int[Tensor, "K"], record: Preprocessing,
    smallest: float, strength: float,
) -> Float[Tensor, "B 3 H W"]:  # fmt: skip
    """Augment a batch by `draws` (`DRAWS` numbers per image): a crop of `smallest`..1 of the area with flip, rotation
    and shear, then brightness, contrast, saturation and occasional greyscale, with the record's normalization. It takes
    one grid sampling and one matrix product. `soft`: the images of `softened`."""
    count, side = len(pixels), pixels.shape[-1]
    images, draws = pixels.float().div_(255), draws.T
    if len(soft):
        images[soft] = F.interpolate(F.avg_pool2d(images[soft], 2), size=(side, side), mode="bilinear")
    places = _placements(draws[1:8], smallest, strength)
    grid = F.affine_grid(places, [count, 3, *record.size], align_corners=False)
    crops = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return _coloured(crops, draws[8:12], record, strength)


def softened(draws: Float[Tensor, "B n"], share: float) -> Int[Tensor, "K"]:
    """Indices of the `share` of images to downsample by two. Computed on the host, to avoid a GPU synchronisation."""
    return (draws[:, 0] < share).nonzero()[:, 0]


def _placements(draws: Float[Tensor, "7 B"], smallest: float, strength: float) -> Float[Tensor, "B 2 3"]:
    """Return affine maps from output to input coordinates, both in [-1, 1]."""
    area = draws[0] * (1 - smallest) + smallest
    most = (0.29, 0.2 * strength, 0.15 * strength, 1.0, 1.0)
    aspect, angle, shear, across, down = (own * limit for own, limit in zip(draws[1:6] * 2 - 1, most, strict=True))
    aspect = aspect.exp()  # 3:4 to 4:3
    wide, high = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    mirror = torch.where(draws[6] < 0.5, -1.0, 1.0)
    rows = [
        wide * mirror * angle.cos(), high * (shear - angle.sin()), (1 - wide) * across,
        wide * mirror * angle.sin(), high * angle.cos(), (1 - high) * down,
    ]  # fmt: skip
    return torch.stack(rows, 1).view(-1, 2, 3)


def _coloured(
    images: Float[Tensor, "B 3 H W"], draws: Float[Tensor, "4 B"], record: Preprocessing, strength: float
) -> Float[Tensor, "B 3 H W"]:
    """Apply colour changes and normalization, all linear in RGB, as one 3x3 matrix and an offset."""
    gain, contrast, colour = (1 + (draws[:3] * 2 - 1) * 0.4 * strength)[..., None, None]
    colour = torch.where(draws[3][:, None, None] < 0.1 * strength, 0.0, colour)
    mean, std = mean_and_deviation(record, images.device)
    matrix = colour * torch.eye(3, device=images.device)
    for band, share in enumerate(LUMA):
        matrix[:, :, band] += (1 - colour[..., 0]) * share
    middle = sum(share * images[:, band].mean((1, 2)) for band, share in enumerate(LUMA))[:, None, None]
    offset = ((1 - contrast) * middle * gain - mean) / std
    return torch.baddbmm(offset, gain * contrast * matrix / std, images.flatten(2)).view_as(images)
