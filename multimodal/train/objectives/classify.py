"""Supervised image classification: mixed images, soft targets, a head on a trained model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.data.loader import Deferred, generator
from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.train.objective import Summed
from multimodal.train.objectives.augment_images import (
    DrawnBatch,
    ImageAugmentSettings,
    ImageExample,
    augmented,
    drawn_batch,
    inside,
    seeded,
)
from multimodal.weights.folder import Checkpoint


class ImageClassBatch(NamedTuple):
    pixels: Float[Tensor, "B 3 H W"]
    targets: Float[Tensor, "B C"]  # rows sum to 1


class MixImages:
    """Collates examples, mixed as timm mixes them, each with its own partner and share. The device augments and mixes
    the images."""

    def __init__(self, classes: int, record: Preprocessing, settings: ImageAugmentSettings):
        self.classes, self.record, self.settings = classes, record, settings

    def __call__(self, examples: Sequence[ImageExample]) -> Deferred:
        from timm.data.mixup import Mixup, mixup_target

        s, count = self.settings, len(examples)
        labels = torch.tensor([e.label for e in examples])
        targets = mixup_target(labels, self.classes, smoothing=s.smoothing)
        shares, boxes = torch.ones(count), torch.zeros(count, 4, dtype=torch.long)
        seed = generator(*(e.seed for e in examples)).initial_seed()
        if s.mix and (s.mixup or s.cutmix):
            even = count // 2 * 2  # timm mixes even batches only: the last image of an odd one stays
            with seeded(seed):
                drawn = Mixup(s.mixup, s.cutmix, None, s.mix, 0.5, "elem", True, s.smoothing, self.classes)
                shares[:even], boxes[:even] = _shares(drawn, even, self.record.size)
            # what a box takes from the partner is its whole value there
            covered = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / math.prod(self.record.size)
            own = torch.where(covered > 0, 1 - covered, shares)[:even]
            targets[:even] = mixup_target(labels[:even], self.classes, own[:, None], s.smoothing)
        finish = partial(_mixed, record=self.record, seed=seed)
        return Deferred(finish, (drawn_batch(examples), shares, boxes, targets))


def _shares(drawn: Any, count: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Share of each image in its mixture, and the box (top, left, bottom, right) that its partner fills, empty if it
    has none: timm's draws, in timm's order."""
    from timm.data.mixup import cutmix_bbox_and_lam

    shares, cut = drawn._params_per_elem(count)
    boxes = torch.zeros(count, 4, dtype=torch.long)
    for i in range(count):
        if shares[i] != 1 and cut[i]:
            (top, bottom, left, right), _ = cutmix_bbox_and_lam((3, *size), shares[i])
            boxes[i] = torch.tensor([top, left, bottom, right])
            shares[i] = 1
    return torch.from_numpy(shares).float(), boxes


def _mixed(
    drawn: DrawnBatch, shares: Tensor, boxes: Tensor, targets: Tensor, record: Preprocessing, seed: int
) -> ImageClassBatch:
    pixels, even = augmented(drawn, record, seed), len(shares) // 2 * 2
    others = torch.cat([pixels[:even].flip(0), pixels[even:]])
    shares = shares[:, None, None, None]
    pixels = torch.where(inside(boxes, record.size)[:, None], others, pixels * shares + others * (1 - shares))
    return ImageClassBatch(pixels, targets)


class SoftTargets(Summed):
    """Cross-entropy against target distributions, averaged over images."""

    def forward(self, batch: ImageClassBatch) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.model(batch.pixels).float(), batch.targets, reduction="sum")}

    def counts(self, batch: ImageClassBatch) -> dict[str, int]:
        return {"loss": len(batch.targets)}


def classifier(start: Checkpoint, labels: Sequence[str], drop_path: float | None = None) -> ViT:
    """Copy the ViT of a checkpoint, or the image tower of a CLIP, with a head for `labels`: its own if the card has the
    same labels in the same order, else a new one of zeros. `drop_path` None: as the checkpoint has it.

    Raises CheckpointError for another model, or one without pooling."""
    model = start.model.image if isinstance(start.model, CLIP) else start.model
    if not isinstance(model, ViT):
        got = start.kind if model is start.model else f"a {start.kind} with {type(model).__name__}"
        raise CheckpointError(f"{start.source}: expected a ViT or a CLIP with one, got {got}")
    if model.config.pool == "none":
        raise CheckpointError(f"{start.source}: expected a model with pooling, got pool 'none'")
    if start.preprocessing is None:
        raise CheckpointError(f"{start.source}: checkpoint has no preprocessing")
    keep = model.head is not None and start.card.get("labels") == list(labels)
    stack = model.config.stack if drop_path is None else replace(model.config.stack, drop_path=drop_path)
    bias = model.config.head_bias if keep else True
    made = ViT(replace(model.config, stack=stack, classes=len(labels), head_bias=bias))
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if keep or not name.startswith(("head.", "distilled_head."))
    }
    made.load_state_dict(own, strict=False)
    if not keep:
        for part in (head for head in (made.head, made.distilled_head) if head is not None):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    return made
