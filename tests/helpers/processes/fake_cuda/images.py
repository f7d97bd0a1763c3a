"""Batches of images that the device augments, as the recipes' collates leave them."""

from functools import partial

import torch

from multimodal.data.datasets.captions import DRAWS, CaptionAugmentSettings, CaptionExample
from multimodal.data.loader import Deferred
from multimodal.tokens.image.operations import OPERATIONS
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.train.objectives import contrastive_model
from multimodal.train.objectives.augment_images import ImageAugmentSettings, ImageExample, Operation
from multimodal.train.objectives.captioning import CollateCaptions
from multimodal.train.objectives.classify import MixImages

RECORD = Preprocessing((32, 32), "shortest", "bicubic", (0.5,) * 3, (0.5,) * 3, 0, 1.0)
NUMBERS = {"bilinear": 9, "bicubic": 9, "auto_contrast": 0, "equalize": 0, "invert": 0}  # others have one


def photos(*heights: int) -> list[torch.Tensor]:
    return [torch.zeros(height, 40, 3, dtype=torch.uint8) for height in heights]


def drawn_images() -> Deferred:
    """An image for each operation, erased and mixed."""
    operations = [Operation(name, (2.0,) * NUMBERS.get(name, 1)) for name in OPERATIONS]
    crops = photos(*range(40, 40 + len(operations)))
    rows = [
        ImageExample(crop, True, [one] * 2, (2, 2, 9, 9), 1, 5) for one, crop in zip(operations, crops, strict=True)
    ]
    return MixImages(10, RECORD, ImageAugmentSettings())(rows)


def drawn_pairs(*texts: torch.Tensor) -> Deferred:
    """Two squares of each of two sizes, of which one is softened."""
    images = [torch.zeros(2, 3, size, size, dtype=torch.uint8) for size in (24, 36)]
    draws, soft = [torch.zeros(2, 12)] * 2, [torch.zeros(1, dtype=torch.long)] * 2
    finish = partial(contrastive_model._augmented, record=RECORD, smallest=0.5, strength=0.5)
    return Deferred(finish, (images, draws, soft, texts))


def drawn_captions() -> Deferred:
    """Two images with captions and a sentence alone."""
    rows = [CaptionExample(image, [1, 7, 8, 2], torch.zeros(DRAWS)) for image in (*photos(40, 50), None)]
    return CollateCaptions(RECORD, CaptionAugmentSettings())(rows)
