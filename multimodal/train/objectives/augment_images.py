"""timm's augmentation of labelled images in two parts: the host decodes, crops and draws, the device does the rest.

timm draws from the global generators of Python, numpy and torch, which are seeded from the item's own generator around
each call and restored, so that a batch depends on its items alone. Its own objects draw, with a list in place of the
image, which receives the operations to apply."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from multimodal.data.datasets.captions import as_tensor, stacked_images
from multimodal.data.sources import Sample
from multimodal.errors import UsageError
from multimodal.system.options import NonNegativeFloat, PositiveShare, Rate, Share, check_limits
from multimodal.tokens.image.operations import OPERATIONS
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.image.resampling import resized_boxes, rotation, scaled_pixels


@dataclass(frozen=True)
class ImageAugmentSettings:
    """Augmentation of labelled images."""

    randaugment: str = "rand-m9-mstd0.5-inc1"  # timm's RandAugment string (Cubuk et al. 2020), empty for none
    smallest_crop: PositiveShare = 0.3  # smallest crop, as a share of the image's area
    flip: Share = 0.5  # probability of mirroring
    erase: Share = 0.25  # probability of random erasing (Zhong et al. 2020)
    mixup: NonNegativeFloat = 0.2  # alpha of mixup (Zhang et al. 2018), 0: none; partners are of the same micro-batch
    cutmix: NonNegativeFloat = 1.0  # alpha of CutMix (Yun et al. 2019), 0: none; with both, each image gets either
    mix: Share = 1.0  # share of the images that are mixed
    smoothing: Rate = 0.1  # label smoothing (Szegedy et al. 2016)

    def __post_init__(self):
        check_limits(self)


class Operation(NamedTuple):
    """One of `OPERATIONS` with its numbers."""

    name: str
    numbers: tuple[float, ...]


class ImageExample(NamedTuple):
    """A crop with what is drawn for it. `erased`: a box (top, left, bottom, right), or None."""

    crop: UInt8[Tensor, "H W 3"]
    mirrored: bool
    operations: list[Operation]
    erased: tuple[int, int, int, int] | None
    label: int
    seed: int  # contributes to the seed of its batch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch (CPU) inside, and restore them."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed an accelerator too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _affine(name: str, value: float, size: tuple[int, int]) -> tuple:
    """The map of timm's function `name`; `size`: (height, width)."""
    height, width = size
    if name == "rotate":
        return rotation(value, width, height)
    return {
        "shear_x": (1, value, 0, 0, 1, 0), "shear_y": (1, 0, 0, value, 1, 0),
        "translate_x_rel": (1, 0, value * width, 0, 1, 0), "translate_y_rel": (1, 0, 0, 0, 1, value * height),
        "translate_x_abs": (1, 0, value, 0, 1, 0), "translate_y_abs": (1, 0, 0, 0, 1, value),
    }[name]  # fmt: skip


MAPS = ("rotate", "shear_x", "shear_y", "translate_x_rel", "translate_y_rel", "translate_x_abs", "translate_y_abs")


def _noted(name: str, size: tuple[int, int], made: list, *numbers: float, fillcolor: Any, resample: Any) -> list:
    """In place of timm's function `name`: append what it would do to the image."""
    # no types of items: to check them, beartype draws from the generator that is seeded here
    if name in MAPS:
        if isinstance(resample, list | tuple):
            resample = random.choice(resample)
        kind = "bilinear" if resample == Image.Resampling.BILINEAR else "bicubic"
        made.append(Operation(kind, (*_affine(name, numbers[0], size), *fillcolor)))
    elif name == "desaturate":
        made.append(Operation("color", (min(1.0, max(0.0, 1 - numbers[0])),)))
    elif name != "posterize":
        made.append(Operation(name, numbers))
    elif numbers[0] < 8:
        made.append(Operation(name, (max(1, numbers[0]),)))  # timm asks for 0 bits at full magnitude
    return made


class _Erased:
    """Stand-in for an image whose box [:, top:bottom, left:right] timm erases."""

    box: tuple[int, int, int, int] | None = None

    def __setitem__(self, places: tuple[slice, slice, slice], _: Tensor) -> None:
        self.box = (places[1].start, places[2].start, places[1].stop, places[2].stop)


class ImageAugment:
    """Draws the augmentation of a labelled image and crops it; `labels` are in the order of the model's outputs.

    Raises UsageError for a RandAugment string that is invalid or has operations without a batched form."""

    def __init__(self, labels: Sequence[str], record: Preprocessing, settings: ImageAugmentSettings):
        from timm.data import create_transform
        from timm.data.random_erasing import RandomErasing
        from timm.data.transforms import RandomResizedCropAndInterpolation

        self.index, s = {label: i for i, label in enumerate(labels)}, settings
        self.record, self.flip, self.scale = record, s.flip, (s.smallest_crop, 1.0)
        # the smallest crop is not enlarged
        self.least = math.ceil(max(record.size) / math.sqrt(s.smallest_crop))
        self.draw_crop = RandomResizedCropAndInterpolation.get_params
        try:
            transforms = create_transform(
                (3, *record.size), is_training=True, scale=self.scale, hflip=0.0, color_jitter=None,
                auto_augment=s.randaugment or None, interpolation=record.interpolation, mean=record.mean,
                std=record.std,
            ).transforms[1:-2]  # fmt: skip
        except (AssertionError, ValueError, KeyError) as error:
            raise UsageError(f"{s.randaugment}: timm does not know it ({error!r})", argument="randaugment") from None
        self.policy = transforms[0] if transforms else None
        self._record_operations(s.randaugment)
        self.erasing = RandomErasing(s.erase, mode="const", device="cpu")

    def _record_operations(self, text: str) -> None:
        from timm.data.auto_augment import AutoAugment, RandAugment

        if not isinstance(self.policy, AutoAugment | RandAugment | None):
            raise UsageError(f"{text}: is not available, RandAugment (rand-...) is", argument="randaugment")
        parts = getattr(self.policy, "ops", None) or getattr(self.policy, "policy", ())
        operations = [one for part in parts for one in (part if isinstance(part, list) else [part])]
        known = {*OPERATIONS, *MAPS, "desaturate"}
        for one in operations:
            name = one.aug_fn.__name__
            if name not in known:
                raise UsageError(f"{text}: {one.name} is not available", argument="randaugment")
            one.aug_fn = partial(_noted, name, self.record.size)

    def __call__(self, sample: Sample, source: torch.Generator) -> ImageExample:
        image = read_image(sample.media, least=self.least)
        own, batch = torch.randint(2**31, (2,), generator=source).tolist()
        with seeded(own):
            top, left, high, wide = self.draw_crop(image, self.scale, (3 / 4, 4 / 3))
            mirrored = bool(self.flip) and torch.rand(1).item() < self.flip
            operations = self.policy([]) if self.policy else []
            erased = self._erased()
        crop = as_tensor(image.crop((left, top, left + wide, top + high)))
        return ImageExample(crop, mirrored, operations, erased, self.index[sample.label], batch)

    def _erased(self) -> tuple[int, int, int, int] | None:
        """The box of timm's random erasing."""
        noted = _Erased()
        if self.erasing.probability:
            self.erasing._erase(noted, 3, *self.record.size, torch.float32)
        return noted.box


class DrawnBatch(NamedTuple):
    """Crops and what is drawn for them. `operations`: for each turn, by name, the images that have it next and its
    numbers. `boxes`: where each of the `erased` images is."""

    crops: UInt8[Tensor, "B H W 3"]
    sizes: Int[Tensor, "B 2"]
    mirrored: Bool[Tensor, "B"]
    operations: list[dict[str, tuple[Int[Tensor, "K"], Float[Tensor, "K n"]]]]
    erased: Int[Tensor, "K"]
    boxes: Int[Tensor, "K 4"]


def drawn_batch(examples: Sequence[ImageExample]) -> DrawnBatch:
    """Join the drawn examples of a batch."""
    turns = []
    for turn in range(max(len(e.operations) for e in examples)):
        groups: dict[str, list[tuple[int, tuple[float, ...]]]] = {}
        for row, example in enumerate(examples):
            if turn < len(example.operations):
                name, numbers = example.operations[turn]
                groups.setdefault(name, []).append((row, numbers))
        turns.append({name: (torch.tensor([row for row, _ in group]), torch.tensor([own for _, own in group]).float())
                      for name, group in groups.items()})  # fmt: skip
    erased = [row for row, example in enumerate(examples) if example.erased]
    boxes = torch.tensor([examples[row].erased for row in erased], dtype=torch.long).view(-1, 4)
    mirrored = torch.tensor([example.mirrored for example in examples])
    crops = stacked_images([example.crop for example in examples])
    return DrawnBatch(*crops, mirrored, turns, torch.tensor(erased, dtype=torch.long), boxes)


def augmented(drawn: DrawnBatch, record: Preprocessing, seed: int) -> Float[Tensor, "B 3 h w"]:
    """The crops resized, changed by their operations, scaled, and erased with noise of `seed`."""
    high, wide = drawn.sizes.T.float()
    zero = torch.zeros_like(high)
    whole = torch.stack([zero, zero, wide, high], 1)
    pixels = resized_boxes(drawn.crops, drawn.sizes, whole, record.size, record.interpolation, drawn.mirrored)
    for turn in drawn.operations:
        for name, (rows, numbers) in turn.items():
            pixels[rows] = OPERATIONS[name](pixels[rows], numbers)
    pixels = scaled_pixels(pixels / 255, record)
    if len(drawn.erased):
        with seeded(seed):  # a GPU draws from its own generator, which the step has seeded
            noise = torch.randn(len(drawn.erased), 3, *record.size, device=pixels.device)
        hidden = inside(drawn.boxes, record.size)[:, None]
        pixels[drawn.erased] = torch.where(hidden, noise, pixels[drawn.erased])
    return pixels


def inside(boxes: Int[Tensor, "B 4"], size: tuple[int, int]) -> Bool[Tensor, "B H W"]:
    """True inside of each box (top, left, bottom, right)."""
    top, left, bottom, right = boxes[:, :, None, None].unbind(1)
    y, x = (torch.arange(n, device=boxes.device) for n in size)
    return (y[:, None] >= top) & (y[:, None] < bottom) & (x >= left) & (x < right)
