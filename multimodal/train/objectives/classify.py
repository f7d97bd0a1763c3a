"""Supervised classification of pictures: timm's augmentation and mixing, soft targets, accuracy.

timm draws from the global generators of Python, numpy and torch. Here they are seeded from the item's own generator
around each call and put back after it, so that a batch depends on nothing but its items.
"""

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor, nn

from multimodal.data.datasets.class_names import class_labels, class_names, evenly
from multimodal.data.loader import BROKEN, generator
from multimodal.data.sources import Sample, Source
from multimodal.errors import CheckpointError, DataError, UsageError, demand
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.tasks.evaluate.scores import top_shares
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess, read_image
from multimodal.train.objective import Summed
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AugmentSettings:
    """Raises UsageError for a value out of its range."""

    randaugment: str = "rand-m9-mstd0.5-inc1"
    """timm's configuration string (Cubuk et al. 2020), empty for none"""
    smallest_crop: float = 0.3
    """share of the picture's area"""
    flip: float = 0.5
    """chance to be mirrored"""
    erase: float = 0.25
    """chance that a rectangle is erased (Zhong et al. 2020)"""
    mixup: float = 0.2
    """alpha of mixup (Zhang et al. 2018), 0 for none; partners are of the same micro-batch"""
    cutmix: float = 1.0
    """alpha of CutMix (Yun et al. 2019), 0 for none; with both, each picture has either"""
    mix: float = 1.0
    """share of the pictures that are mixed"""
    smoothing: float = 0.1
    """of the labels (Szegedy et al. 2016)"""

    def __post_init__(self):
        demand("smallest_crop", self.smallest_crop, 0 < self.smallest_crop <= 1, "over 0, up to 1")
        for name in ("flip", "erase", "mix"):
            demand(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0 to 1")
        for name in ("mixup", "cutmix"):
            demand(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 or more")
        demand("smoothing", self.smoothing, 0 <= self.smoothing < 1, "0 to under 1")


class Example(NamedTuple):
    pixels: Float[Tensor, "3 H W"]
    label: int
    seed: int  # this item's part in the seed of its batch


class Classified(NamedTuple):
    pixels: Float[Tensor, "B 3 H W"]
    targets: Float[Tensor, "B C"]  # rows sum to 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's (CPU) global generators seeded inside, and as before after it."""
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


def _posterize(picture: Image.Image, bits: int, **_: Any) -> Image.Image:
    # timm asks for 0 bits at full magnitude, which Pillow refuses
    return picture if bits >= 8 else ImageOps.posterize(picture, max(1, bits))


class Augment:
    """A labelled picture to an example; `labels` in the order of the model's outputs.

    Raises UsageError for a string that timm does not understand."""

    def __init__(self, labels: Sequence[str], record: Preprocessing, settings: AugmentSettings):
        from timm.data import create_transform

        self.index = {label: i for i, label in enumerate(labels)}
        try:
            self.transform = create_transform(
                (3, *record.size), is_training=True, scale=(settings.smallest_crop, 1.0), hflip=settings.flip,
                color_jitter=None, auto_augment=settings.randaugment or None, interpolation=record.interpolation,
                mean=record.mean, std=record.std, re_prob=settings.erase, re_mode="pixel",
            )  # fmt: skip
        except (AssertionError, ValueError, KeyError) as error:
            raise UsageError(f"--randaugment {settings.randaugment}: timm does not know it ({error!r})") from None
        for operation in (o for t in self.transform.transforms for o in getattr(t, "ops", ()) if "Post" in o.name):
            operation.aug_fn = _posterize

    def __call__(self, sample: Sample, source: torch.Generator) -> Example:
        picture = read_image(sample.media)
        own, batch = torch.randint(2**31, (2,), generator=source).tolist()
        with seeded(own):
            return Example(self.transform(picture), self.index[sample.label], batch)


class Mix:
    """Examples to a batch, mixed by timm, each with its own partner and share."""

    def __init__(self, classes: int, settings: AugmentSettings):
        self.classes, self.settings = classes, settings

    def __call__(self, examples: Sequence[Example]) -> Classified:
        from timm.data.mixup import Mixup, mixup_target

        s = self.settings
        pixels, labels = torch.stack([e.pixels for e in examples]), torch.tensor([e.label for e in examples])
        targets = mixup_target(labels, self.classes, smoothing=s.smoothing)
        if s.mix and (s.mixup or s.cutmix):
            mixup = Mixup(s.mixup, s.cutmix, None, s.mix, 0.5, "elem", True, s.smoothing, self.classes)
            even = len(examples) // 2 * 2  # timm mixes even batches only; an odd one's last picture stays as it is
            with seeded(generator(*(e.seed for e in examples)).initial_seed()):
                _, targets[:even] = mixup(pixels[:even], labels[:even])
        return Classified(pixels, targets)


class SoftTargets(Summed):
    """Cross-entropy against distributions, the mean over pictures."""

    def forward(self, batch: Classified) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(batch.pixels).float(), batch.targets, reduction="sum")}

    def counts(self, batch: Classified) -> dict[str, int]:
        return {"loss": len(batch.targets)}


def names_of(labels: Sequence[str], files: Sequence[Path], sources: Sequence[str | Path]) -> list[str]:
    """The first name that `files` or a `classes.jsonl` beside `sources` have for each class id, else the id with
    spaces."""
    known = class_names(files, sources)
    return [known[label].names[0] if label in known else label.replace("_", " ") for label in labels]


def classifier(start: Checkpoint, labels: Sequence[str], drop_path: float = 0.0) -> ViT:
    """The ViT of a checkpoint, or the picture tower of a CLIP, with a head for `labels`: its own where the card says
    that it was made for the same ones in this order, else a new one of zeros.

    Raises CheckpointError for a model of another kind, or one that gives no vector a picture."""
    model = start.model.image if isinstance(start.model, CLIP) else start.model
    if not isinstance(model, ViT):
        raise CheckpointError(f"{start.source}: is of kind {start.kind}; classification needs a vit or a clip")
    if model.config.pool == "none":
        raise CheckpointError(f"{start.source}: pools no vector that could be classified (pool 'none')")
    if start.preprocessing is None:
        raise CheckpointError(f"{start.source}: its preprocessing is not known, and is not guessed")
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


class Accuracy:
    """Called with a model: the shares of a source's pictures whose label comes first, and among the first five.

    `count`: about so many pictures, evenly spread. A broken one is logged and left out. Raises DataError for a source
    whose classes are not all among `labels`. `examples`: label and guess of a few pictures of the last call."""

    def __init__(
        self, source: Source, labels: Sequence[str], record: Preprocessing, where: object, count: int | None = None,
        batch: int = 100,
    ):  # fmt: skip
        unknown = sorted(set(class_labels(source, where, 1)) - set(labels))
        if unknown:
            raise DataError(f"{where}: has the class {unknown[0]!r}, which the model's {len(labels)} classes lack")
        self.source, self.record, self.batch = source, record, batch
        self.index = {label: i for i, label in enumerate(labels)}
        self.keys = range(0, len(source), max(1, len(source) // count) if count else 1)
        self.examples: list[str] = []

    def read(self, keys: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
        """Pixels and class index of each whole picture."""
        for key in keys:
            try:
                sample = self.source.read(key)
                yield preprocess(read_image(sample.media), self.record), self.index[sample.label]
            except BROKEN as error:
                log.warning("broken item left out: %s: %s", self.source.name(key), error)

    @torch.inference_mode()
    def __call__(self, model: nn.Module, step: int = 0) -> dict[str, float]:
        device, scores, labels = next(model.parameters()).device, [], []
        for start in range(0, len(self.keys), self.batch):
            if part := list(self.read(self.keys[start : start + self.batch])):
                pixels, own = zip(*part, strict=True)
                scores.append(model(torch.stack(pixels).to(device)).float().cpu())
                labels += own
        if not labels:
            raise DataError(f"{self.source.name(0)} and all others cannot be read, so there is no accuracy")
        guesses, known = torch.cat(scores).argmax(1).tolist(), list(self.index)
        rows = evenly(list(zip(labels, guesses, strict=True)), 10)
        self.examples = [f"{known[label]} | {known[guess]}" for label, guess in rows]
        return top_shares(torch.cat(scores), torch.tensor(labels))
