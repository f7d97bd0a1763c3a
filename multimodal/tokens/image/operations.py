"""Pillow's operations on images on any device, in batches: each image has its own parameter.

Values are whole numbers in 0..255 in float32, and results equal Pillow's but for roundings (see `resampling`)."""

import torch
from jaxtyping import Float
from torch import Tensor

from multimodal.tokens.image.resampling import EDGE, mapped

Images = Float[Tensor, "B 3 H W"]
Numbers = Float[Tensor, "B n"]


def grey(images: Images) -> Float[Tensor, "B 1 H W"]:
    """Luma of ITU-R 601-2 in whole numbers, as `convert("L")`."""
    red, green, blue = images.unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor()[:, None]


def blended(base: Tensor, images: Images, factor: Numbers) -> Images:
    """`base` at factor 0, the image at 1, beyond it at more: `ImageEnhance`."""
    return (base + factor[:, :1, None, None] * (images - base) + EDGE).clamp(0, 255).floor()


def color(images: Images, factor: Numbers) -> Images:
    return blended(grey(images), images, factor)


def contrast(images: Images, factor: Numbers) -> Images:
    return blended((grey(images).mean((2, 3), keepdim=True) + 0.5).floor(), images, factor)


def brightness(images: Images, factor: Numbers) -> Images:
    return blended(torch.zeros_like(images), images, factor)


def sharpness(images: Images, factor: Numbers) -> Images:
    smooth = images.clone()  # the border stays
    if min(images.shape[-2:]) > 2:
        middle = images[..., 1:-1, 1:-1]
        around = images.unfold(2, 3, 1).unfold(3, 3, 1).sum((-2, -1))
        smooth[..., 1:-1, 1:-1] = ((around + 4 * middle) / 13 + 0.5).floor()
    return blended(smooth, images, factor)


def auto_contrast(images: Images, _: Numbers) -> Images:
    """Stretch each channel to 0..255."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scale = 255 / (high - low).clamp(min=1)
    return torch.where(high > low, ((images - low) * scale + EDGE).floor().clamp(0, 255), images)


def equalize(images: Images, _: Numbers) -> Images:
    """Equalize the histogram of each channel."""
    levels = images.flatten(2).long()
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.float32, device=images.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels, dtype=counts.dtype))
    places = torch.arange(256, device=images.device)
    top = (counts > 0).mul(places).amax(2, keepdim=True)
    step = ((counts.sum(2, keepdim=True) - counts.gather(2, top)) / 255).floor()
    before = counts.cumsum(2) - counts
    table = (((step / 2).floor() + before) / step.clamp(min=1)).floor().clamp(max=255)
    return torch.where(step > 0, table, places).gather(2, levels).view_as(images)


def invert(images: Images, _: Numbers) -> Images:
    return 255 - images


def solarize(images: Images, threshold: Numbers) -> Images:
    """Invert levels from `threshold` on."""
    return torch.where(images < threshold[:, :1, None, None], images, 255 - images)


def solarize_add(images: Images, added: Numbers) -> Images:
    """Add to levels under 128."""
    return torch.where(images < 128, images + added[:, :1, None, None], images).clamp(max=255)


def posterize(images: Images, bits: Numbers) -> Images:
    """Keep the highest `bits` of each level."""
    step = 2 ** (8 - bits[:, :1, None, None])
    return (images / step).floor() * step


def bilinear(images: Images, numbers: Numbers) -> Images:
    """An affine map: six numbers of `resampling.mapped` and three of the colour outside."""
    return mapped(images, numbers[:, :6], numbers[:, 6:], cubic=False)


def bicubic(images: Images, numbers: Numbers) -> Images:
    return mapped(images, numbers[:, :6], numbers[:, 6:], cubic=True)


OPERATIONS = {
    function.__name__: function
    for function in (
        color, contrast, brightness, sharpness, auto_contrast, equalize, invert, solarize, solarize_add, posterize,
        bilinear, bicubic,
    )
}  # fmt: skip
