"""Supervised image classification: timm's augmentation and mixing, soft targets, accuracy.

timm draws from the global generators of Python, numpy and torch, which are seeded from the item's own generator around
each call and restored, so that a batch depends on its items alone.
"""

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor, nn

from multimodal.data.loader import generator
from multimodal.data.sources import Sample
from multimodal.errors import CheckpointError, UsageError, demand
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.image.reading import read_image
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageAugmentSettings:
    """Augmentation of labelled images."""

    randaugment: str = "rand-m9-mstd0.5-inc1"  # timm's RandAugment string (Cubuk et al. 2020), empty for none
    smallest_crop: float = 0.3  # smallest crop, as a share of the image's area
    flip: float = 0.5  # probability of mirroring
    erase: float = 0.25  # probability of random erasing (Zhong et al. 2020)
    mixup: float = 0.2  # alpha of mixup (Zhang et al. 2018), 0 for none; partners come from the same micro-batch
    cutmix: float = 1.0  # alpha of CutMix (Yun et al. 2019), 0 for none; with both, each image gets either
    mix: float = 1.0  # share of the images that are mixed
    smoothing: float = 0.1  # label smoothing (Szegedy et al. 2016)

    def __post_init__(self):
        demand("smallest_crop", self.smallest_crop, 0 < self.smallest_crop <= 1, "over 0, up to 1")
        for name in ("flip", "erase", "mix"):
            demand(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("mixup", "cutmix"):
            demand(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 or more")
        demand("smoothing", self.smoothing, 0 <= self.smoothing < 1, "0 to under 1")


class ImageExample(NamedTuple):
    pixels: Float[Tensor, "3 H W"]
    label: int
    seed: int  # contributes to the seed of its batch


class ImageClassBatch(NamedTuple):
    pixels: Float[Tensor, "B 3 H W"]
    targets: Float[Tensor, "B C"]  # rows sum to 1


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


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    # timm asks for 0 bits at full magnitude, which Pillow refuses
    return image if bits >= 8 else ImageOps.posterize(image, max(1, bits))


class ImageAugment:
    """Augments a labelled image; `labels` are in the order of the model's outputs.

    Raises UsageError for an invalid RandAugment string."""

    def __init__(self, labels: Sequence[str], record: Preprocessing, settings: ImageAugmentSettings):
        from timm.data import create_transform

        self.index = {label: i for i, label in enumerate(labels)}
        try:
            self.transform = create_transform(
                (3, *record.size), is_training=True, scale=(settings.smallest_crop, 1.0), hflip=settings.flip,
                color_jitter=None, auto_augment=settings.randaugment or None, interpolation=record.interpolation,
                mean=record.mean, std=record.std, re_prob=settings.erase, re_mode="pixel",
            )  # fmt: skip
        except (AssertionError, ValueError, KeyError) as error:
            raise UsageError(
                f"{settings.randaugment}: timm does not know it ({error!r})", argument="randaugment"
            ) from None
        for operation in (o for t in self.transform.transforms for o in getattr(t, "ops", ()) if "Post" in o.name):
            operation.aug_fn = _posterize

    def __call__(self, sample: Sample, source: torch.Generator) -> ImageExample:
        image = read_image(sample.media)
        own, batch = torch.randint(2**31, (2,), generator=source).tolist()
        with seeded(own):
            return ImageExample(self.transform(image), self.index[sample.label], batch)


class MixImages:
    """Collates examples, mixed by timm, each with its own partner and share."""

    def __init__(self, classes: int, settings: ImageAugmentSettings):
        self.classes, self.settings = classes, settings

    def __call__(self, examples: Sequence[ImageExample]) -> ImageClassBatch:
        from timm.data.mixup import Mixup, mixup_target

        s = self.settings
        pixels, labels = torch.stack([e.pixels for e in examples]), torch.tensor([e.label for e in examples])
        targets = mixup_target(labels, self.classes, smoothing=s.smoothing)
        if s.mix and (s.mixup or s.cutmix):
            mixup = Mixup(s.mixup, s.cutmix, None, s.mix, 0.5, "elem", True, s.smoothing, self.classes)
            even = len(examples) // 2 * 2  # timm mixes even batches only: the last image of an odd one stays
            with seeded(generator(*(e.seed for e in examples)).initial_seed()):
                _, targets[:even] = mixup(pixels[:even], labels[:even])
        return ImageClassBatch(pixels, targets)


class SoftTargets(Summed):
    """Cross-entropy against target distributions, averaged over images."""

    def forward(self, batch: ImageClassBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(batch.pixels).float(), batch.targets, reduction="sum")}

    def counts(self, batch: ImageClassBatch) -> dict[str, int]:
        return {"loss": len(batch.targets)}


def classifier(start: Checkpoint, labels: Sequence[str], drop_path: float = 0.0) -> ViT:
    """Copy the ViT of a checkpoint, or the image tower of a CLIP, with a head for `labels`: its own if the card has the
    same labels in the same order, else a new one of zeros.

    Raises CheckpointError for another model, or one without pooling."""
    model = start.model.image if isinstance(start.model, CLIP) else start.model
    if not isinstance(model, ViT):
        raise CheckpointError(f"{start.source}: expected a ViT or a CLIP, got {start.kind}")
    if model.config.pool == "none":
        raise CheckpointError(f"{start.source}: expected a model with pooling, got pool 'none'")
    if start.preprocessing is None:
        raise CheckpointError(f"{start.source}: checkpoint has no preprocessing")
    keep = model.head is not None and start.card.get("labels") == list(labels)
    stack = replace(model.config.stack, drop_path=drop_path)
    bias = model.config.head_bias if keep else True
    made = ViT(replace(model.config, stack=stack, classes=len(labels), head_bias=bias))
    own = {name: tensor for name, tensor in model.state_dict().items() if keep or not name.startswith("head.")}
    made.load_state_dict(own, strict=False)
    if not keep:
        nn.init.zeros_(made.head.weight)
        nn.init.zeros_(made.head.bias)
    return made
