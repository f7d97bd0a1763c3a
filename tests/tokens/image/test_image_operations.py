"""Batched resampling and operations beside Pillow's: whole levels, at most one off."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from multimodal.tokens.image.operations import OPERATIONS
from multimodal.tokens.image.reading import read_image
from multimodal.tokens.image.resampling import resized_boxes, rotation

MAPS = {
    "rotate": (13.3, rotation(13.3, 40, 30)), "shear_x": (0.2, (1, 0.2, 0, 0, 1, 0)),
    "shear_y": (-0.3, (1, 0, 0, -0.3, 1, 0)), "translate_x_rel": (0.31, (1, 0, 0.31 * 40, 0, 1, 0)),
}  # fmt: skip


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)


def levels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image))


def difference(made: torch.Tensor, wanted: Image.Image) -> torch.Tensor:
    return (made.permute(1, 2, 0) - levels(wanted)).abs()


@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "lanczos"])
def test_boxes_are_resized_as_by_pillow(kind):
    sizes = [(60, 60), (40, 31), (13, 60), (90, 20), (20, 24)]
    images = [photo(*size, seed) for seed, size in enumerate(sizes)]
    padded = torch.zeros(5, 60, 90, 3, dtype=torch.uint8)
    for place, image in zip(padded, images, strict=True):
        place[: image.height, : image.width] = levels(image)
    boxes = [(0, 0, 60, 60), (1.3, 2.1, 37.2, 30.9), (0, 0.5, 13, 59.25), (3, 4, 80, 16), (0, 0, 20, 24)]
    shapes, mirrored = torch.tensor([(h, w) for w, h in sizes]), torch.tensor([False, True, False, False, False])
    made = resized_boxes(padded, shapes, torch.tensor(boxes), (24, 20), kind, mirrored)
    for number, (image, box) in enumerate(zip(images, boxes, strict=True)):
        wanted = image.resize((20, 24), getattr(Image.Resampling, kind.upper()), box)
        off = difference(made[number], wanted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if number == 1 else wanted)
        assert off.max() <= (2 if number == 2 else 1)  # Pillow may take rows before columns, which rounds otherwise


@pytest.mark.parametrize(("name", "numbers"), [
    ("color", (1.6,)), ("color", (0.3,)), ("contrast", (0.4,)), ("contrast", (1.9,)), ("brightness", (1.5,)),
    ("sharpness", (1.8,)), ("sharpness", (0.2,)), ("auto_contrast", ()), ("equalize", ()), ("invert", ()),
    ("solarize", (100,)), ("solarize", (256,)), ("solarize_add", (40,)), ("posterize", (3,)), ("posterize", (1,)),
])  # fmt: skip
def test_operations_are_those_of_pillow(name, numbers):
    images = [photo(40, 30), photo(40, 30, 1), Image.new("RGB", (40, 30), (9, 0, 255))]
    batch = torch.stack([levels(image) for image in images]).permute(0, 3, 1, 2).float()
    made = OPERATIONS[name](batch, torch.tensor([numbers] * 3).float())
    for own, image in zip(made, images, strict=True):
        assert difference(own, getattr(auto_augment, name)(image, *numbers)).max() <= 1


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", MAPS)
def test_maps_are_those_of_pillow(name, kind):
    (value, numbers), fill, image = MAPS[name], (10, 200, 30), photo(40, 30)
    made = OPERATIONS[kind](levels(image).permute(2, 0, 1)[None].float(), torch.tensor([[*numbers, *fill]]).float())
    resample = getattr(Image.Resampling, kind.upper())
    off = difference(made[0], getattr(auto_augment, name)(image, value, fillcolor=fill, resample=resample))
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.05


def test_a_jpeg_read_for_training_is_near_the_whole_one(tmp_path):
    photo(640, 480).save(tmp_path / "one.jpg", quality=90)
    small, whole = read_image(tmp_path / "one.jpg", least=112), read_image(tmp_path / "one.jpg")
    assert (small.size, whole.size) == ((160, 120), (640, 480))
    assert difference(levels(small).permute(2, 0, 1).float(), whole.resize((160, 120))).mean() < 1
    assert read_image(tmp_path / "one.jpg", least=300).size == (640, 480)
