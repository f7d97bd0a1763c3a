"""Captioner training data: images with captions, labelled images with templates, and sentences without images."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from multimodal.data.batching import zeros_of_batch
from multimodal.data.datasets.class_names import evenly, words
from multimodal.data.examples import SizedCache
from multimodal.data.loader import Plan, generator
from multimodal.data.manifests import read_text
from multimodal.data.sources import JoinedSources, PackedRows, Sample, Source, SourceRow, joined
from multimodal.errors import DataError, UsageError
from multimodal.system.options import PositiveShare, Share
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.image.resampling import resized_boxes, scaled_pixels
from multimodal.tokens.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class CaptionExample(NamedTuple):
    image: UInt8[Tensor, "H W 3"] | None  # None: a sentence without an image
    ids: list[int]  # bos .. eos
    draws: Float[Tensor, "D"]  # of `augmented`


TEMPLATES = ("a photo of a {}.", "a picture of a {}.", "a close-up of a {}.", "this is a {}.")
KEPT = 1 << 29  # bytes of resized images cached per process
SPARE = 1.25  # edge of a cached image, of the model's: most crops are not enlarged
CHECKED = 1000
DRAWS = 7  # random numbers in [0, 1) per image


@dataclass(frozen=True)
class CaptionAugmentSettings:
    """Augmentation of the images."""

    smallest_crop: PositiveShare = 0.5  # smallest crop, as a share of the image's area
    flip: Share = 0.5  # probability of mirroring
    colour: Share = 0.2  # largest change of brightness and contrast


class PrepareCaption:
    """Draws a caption and the numbers that augment the image.

    `names`: class names by label; other labels are names themselves. Resized images are cached, up to `KEPT` bytes,
    since decoding a photograph takes longer than a small model's step."""

    def __init__(self, tokenizer: Tokenizer, context: int, record: Preprocessing, names: Mapping[str, Sequence[str]]):
        self.tokenizer, self.context, self.record = tokenizer, context, record
        self.names, self.kept = names, SizedCache(KEPT, attrgetter("nbytes"))

    def __call__(self, sample: Sample, random: torch.Generator) -> CaptionExample:
        texts = [text for text in captions_of(sample, self.names) if text.replace(".", " ").strip()]
        if not texts:
            raise DataError("its caption is empty" if sample.texts else "neither a caption nor a label")
        ids = self.tokenizer.encode(tidy(texts[_below(len(texts), random)]))[: self.context - 2]
        ids = [self.tokenizer.bos_id, *ids, self.tokenizer.eos_id]
        return CaptionExample(
            None if sample.fields.get("alone") else self._image(sample), ids, torch.rand(DRAWS, generator=random)
        )

    def _image(self, sample: Sample) -> UInt8[Tensor, "H W 3"]:
        key = sample.media if isinstance(sample.media, Path) else sha256(sample.media).digest()  # names may repeat
        least = math.ceil(SPARE * max(self.record.size))
        read = lambda: as_tensor(smaller(read_image(sample.media, least=least), self.record))
        return self.kept.get_or_make(key, read)


def as_tensor(image: Image.Image) -> UInt8[Tensor, "H W 3"]:
    return torch.from_numpy(np.array(image))


def smaller(image: Image.Image, record: Preprocessing) -> Image.Image:
    """The image, if it is large, resized to `SPARE` of the model's size."""
    ratio = SPARE * max(record.size) / min(image.size)
    return (
        image if ratio >= 1 else image.resize([round(side * ratio) for side in image.size], Image.Resampling.BILINEAR)
    )


def stacked_images(images: Sequence[UInt8[Tensor, "_ _ 3"]]) -> tuple[UInt8[Tensor, "B H W 3"], Int[Tensor, "B 2"]]:
    """Images of any size in one tensor, padded at the right and below, and their heights and widths."""
    sizes = torch.tensor([image.shape[:2] for image in images], dtype=torch.long).view(-1, 2)
    most = [max((image.shape[axis] for image in images), default=1) for axis in (0, 1)]
    made = zeros_of_batch(len(images), *most, 3, dtype=torch.uint8)
    for place, image in zip(made, images, strict=True):
        place[: image.shape[0], : image.shape[1]] = image
    return made, sizes


def augmented(
    images: UInt8[Tensor, "B H W 3"], sizes: Int[Tensor, "B 2"], draws: Float[Tensor, "B D"], record: Preprocessing,
    s: CaptionAugmentSettings,
) -> Float[Tensor, "B 3 h w"]:  # fmt: skip
    """Pixels of a random crop of each image, mirrored or not, with another brightness and contrast, by `DRAWS` numbers
    per image."""
    height, width = record.size
    area, aspect, x, y, mirror, brighter, sharper = draws.T
    tall, broad = sizes.T.float()
    area = (s.smallest_crop + (1 - s.smallest_crop) * area) * broad * tall
    aspect = ((2 * aspect - 1) * math.log(4 / 3)).exp() * (width / height)
    wide, high = (area * aspect).sqrt().minimum(broad), (area / aspect).sqrt().minimum(tall)
    left, top = x * (broad - wide), y * (tall - high)
    boxes = torch.stack([left, top, left + wide, top + high], 1)
    pixels = resized_boxes(images, sizes, boxes, record.size, "bilinear", mirror < s.flip) / 255
    gain, contrast = ((1 + (2 * own - 1) * s.colour)[:, None, None, None] for own in (brighter, sharper))
    middle = pixels.mean((1, 2, 3), keepdim=True)
    return scaled_pixels(((pixels - middle) * contrast + middle) * gain, record)


def _below(count: int, random: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=random))


def tidy(text: str) -> str:
    """Remove the final full stop and spaces before punctuation, in which caption sets differ."""
    text = " ".join(text.split()).removesuffix(".").rstrip()
    for mark in (",", "'s", "'t", ";"):
        text = text.replace(f" {mark}", mark)
    return text


def captions_of(sample: Sample | SourceRow, names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return an item's texts, or templates filled with its class names."""
    if sample.texts or sample.label is None:
        return list(sample.texts)
    called = names.get(sample.label) or (sample.label.replace("_", " ").lower(),)
    return [template.format(name) for name in called for template in TEMPLATES]


class OneRowPerImage(JoinedSources):
    """A source whose rows of one file, as of a list with a line per caption, are one item with all their texts."""

    def __init__(self, source: Source):
        super().__init__([source])
        groups: dict[str, list[int]] = {}
        for key in range(len(source)):
            groups.setdefault(source.name(key) if source.row(key).fault else source.identity(key), []).append(key)
        self.groups = list(groups.values())

    def __len__(self) -> int:
        return len(self.groups)

    def _at(self, key: int) -> tuple[Source, int]:
        return self.sources[0], self.groups[key][0]

    def row(self, key: int) -> SourceRow:
        first, *others = map(self.sources[0].row, self.groups[key])
        return first._replace(texts=[*first.texts, *chain.from_iterable(row.texts for row in others)])

    def read(self, key: int) -> Sample:
        return replace(super().read(key), texts=tuple(self.row(key).texts))


@dataclass(frozen=True)
class SourcePart:
    """Keys of a source, `count` of them per batch."""

    source: Source
    keys: Sequence[int]
    count: int

    @classmethod
    def whole(cls, source: Source, count: int = 0) -> "SourcePart":
        return cls(source, range(len(source)), count)

    def held_out(
        self, share: float, rank: Callable[[SourceRow], Any] | None = None
    ) -> tuple["SourcePart", "SourcePart"]:
        """Split off a `share` of keys, evenly spread or those of the lowest `rank`: (the others, those). Raises
        UsageError if either has under two."""
        count = round(share * len(self.keys))
        if not 2 <= count <= len(self.keys) - 2:
            parts = f"must leave two or more of {len(self.keys)} items in each part"
            raise UsageError(f"{share}: {parts}", argument="hold")
        held = evenly(self.keys, count)
        if rank:
            held = sorted(sorted(self.keys, key=lambda key: rank(self.source.row(key)))[:count])
        return replace(self, keys=sorted(set(self.keys) - set(held))), replace(self, keys=held, count=0)

    def rows(self) -> Iterator[SourceRow]:
        return map(self.source.row, self.keys)


def together(parts: Sequence[SourcePart], seed: int) -> tuple[Source, Plan]:
    """Join parts into one source, and plan batches of `count` items of each. An epoch is one pass over the first part;
    the others repeat no item before all were used. Raises DataError for a part smaller than its share of a batch."""
    groups, first = [], 0
    for part in parts:
        if not 0 < part.count <= len(part.keys):
            raise DataError(f"a batch cannot take {part.count} of a part of {len(part.keys)} items")
        groups.append([first + key for key in part.keys])
        first += len(part.source)
    batches = len(parts[0].keys) // parts[0].count

    def plan(epoch: int) -> list[list[int]]:
        drawn = []
        for number, (keys, part) in enumerate(zip(groups, parts, strict=True)):
            order = _order(keys, batches * part.count, (seed, epoch, number))
            drawn.append([order[i * part.count : (i + 1) * part.count] for i in range(batches)])
        return [[key for own in batch for key in own] for batch in zip(*drawn, strict=True)]

    return joined([part.source for part in parts]), plan


def _order(keys: Sequence[int], count: int, seed: tuple) -> list[int]:
    random, found = generator(*seed), []
    while len(found) < count:
        found += [keys[i] for i in torch.randperm(len(keys), generator=random).tolist()]
    return found[:count]


def sentences(paths: Sequence[Path], held_out: Sequence[str]) -> Source:
    """Read sentences, one per line, packed or not, without those too similar to any of `held_out` (see `unlike`).

    Raises DataError."""
    return joined([_sentences(path, held_out) for path in paths])


def _sentences(path: Path, held_out: Sequence[str]) -> PackedRows:
    lines = [line.strip() for line in read_text(path).split("\n")]
    rows = [(f"{path} line {i}", line) for i, line in enumerate(lines, 1) if line]
    fine = unlike([line for _, line in rows], held_out)
    kept = ((name, line) for (name, line), keep in zip(rows, fine, strict=True) if keep)
    return PackedRows(str(path), (SourceRow(name, "", None, [line], {"alone": True}) for name, line in kept))


def warn_of_long(texts: Sequence[str], tokenizer: Tokenizer, room: int) -> None:
    """Log how many of `CHECKED` texts have more than `room` tokens, after which training cuts them."""
    some = evenly(texts, CHECKED)
    if cut := sum(len(tokenizer.encode(text)) > room for text in some):
        log.warning("%d of %d captions have more than %d tokens and are cut", cut, len(some), room)


def unlike(texts: Sequence[str], held_out: Sequence[str]) -> list[bool]:
    """Return True for each text whose Jaccard word overlap with all held-out ones is under 0.6."""
    known = {word: i for i, word in enumerate(sorted({w for text in held_out for w in words(text).split()}))}
    if not known:
        return [True] * len(texts)
    bags = _bags([words(text).split() for text in held_out], known)
    found = []
    for start in range(0, len(texts), 4096):
        own = [words(text).split() for text in texts[start : start + 4096]]
        shared = _bags(own, known) @ bags.T
        sizes = torch.tensor([float(len(set(text))) for text in own])
        found += (shared < 0.6 * (sizes[:, None] + bags.sum(1) - shared)).all(1).tolist()
    return found


def _bags(texts: Iterable[Sequence[str]], known: Mapping[str, int]) -> Float[Tensor, "N W"]:
    rows = [[known[word] for word in set(text) if word in known] for text in texts]
    bags = torch.zeros(len(rows), len(known))
    for bag, row in zip(bags, rows, strict=True):
        bag[row] = 1
    return bags


def texts_of(part: SourcePart) -> Iterator[str]:
    for row in part.rows():
        yield from row.texts


def caption_texts(parts: Iterable[SourcePart], names: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield all captions, those of each class once, to train the tokenizer."""
    for part in parts:
        seen = set()
        for row in part.rows():
            if row.texts or row.label not in seen:
                yield from map(tidy, captions_of(row, names))
            seen.add(row.label)
