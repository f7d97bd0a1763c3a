"""Pillow's resampling of images on any device, in batches: each image has its own box or map.

Values are whole numbers in 0..255 in float32, rounded where Pillow rounds them, so that results differ from Pillow's
by at most one level, where float32 falls on the other side of a rounding."""

import math
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from multimodal.tokens.image.preprocessing import Interpolation, Preprocessing

REACH = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}  # of a filter, in pixels
EDGE = 1e-3  # added before rounding down: a product in float32 may fall just below the whole number


def resized_boxes(
    images: UInt8[Tensor, "B H W 3"], sizes: Int[Tensor, "B 2"], boxes: Float[Tensor, "B 4"], size: tuple[int, int],
    interpolation: Interpolation, mirrored: Bool[Tensor, "B"],
) -> Float[Tensor, "B 3 h w"]:  # fmt: skip
    """Resize the box (left, top, right, bottom) of each image to `size` (height, width), as `Image.resize(box=)` does,
    and mirror some. `sizes`: (height, width) of each image; the rest of its place in the batch is padding.

    Two matrix products: the filter's weights for columns, then for rows."""
    height, width = images.shape[1:3]
    left, top, right, bottom = boxes.unbind(1)
    across = _weights(left, right, sizes[:, 1], size[1], width, interpolation)
    across = torch.where(mirrored[:, None, None], across.flip(1), across)
    down = _weights(top, bottom, sizes[:, 0], size[0], height, interpolation)
    rows = torch.einsum("byxc,box->bcyo", images.float(), across)
    return _whole(torch.einsum("bcyo,bpy->bcpo", _whole(rows), down))


def scaled_pixels(pixels: Float[Tensor, "B 3 H W"], record: Preprocessing) -> Float[Tensor, "B 3 H W"]:
    """Values in 0..1 less the record's mean, by its deviation."""
    mean, std = mean_and_deviation(record, pixels.device)
    return (pixels - mean[:, None]) / std[:, None]


def mean_and_deviation(
    record: Preprocessing, device: torch.device
) -> tuple[Float[Tensor, "3 1"], Float[Tensor, "3 1"]]:
    """The record's, on a device."""
    return _column(*record.mean, device), _column(*record.std, device)


@lru_cache(maxsize=16)
def _column(red: float, green: float, blue: float, device: torch.device) -> Float[Tensor, "3 1"]:
    """Cached, since copies stall a GPU."""
    return torch.tensor([red, green, blue], dtype=torch.float32, device=device)[:, None]


def _whole(values: Tensor) -> Tensor:
    return (values + 0.5).floor_().clamp_(0, 255)


def _weights(
    first: Float[Tensor, "B"], last: Float[Tensor, "B"], sizes: Int[Tensor, "B"], made: int, given: int,
    interpolation: Interpolation,
) -> Float[Tensor, "B O I"]:  # fmt: skip
    """The share of each of `given` pixels in each of `made`, which divide [first, last)."""
    scale = ((last - first) / made)[:, None, None]
    wide = scale.clamp(min=1)  # an enlargement does not widen the filter
    out, places = (torch.arange(n, device=first.device, dtype=torch.float32) + 0.5 for n in (made, given))
    centre = first[:, None, None] + out[:, None] * scale
    x = ((places - centre) / wide).abs()
    own = (places < sizes[:, None, None]) & (x < REACH[interpolation])
    weights = torch.where(own, FILTERS[interpolation](x), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def _bicubic(x: Tensor) -> Tensor:
    near = (1.5 * x - 2.5) * x * x + 1
    return torch.where(x < 1, near, ((-0.5 * x + 2.5) * x - 4) * x + 2)


FILTERS = {
    "bilinear": lambda x: 1 - x,
    "bicubic": _bicubic,
    "lanczos": lambda x: torch.sinc(x) * torch.sinc(x / 3),
}


def mapped(
    images: Float[Tensor, "B 3 H W"], maps: Float[Tensor, "B 6"], fill: Float[Tensor, "B 3"], cubic: bool
) -> Float[Tensor, "B 3 H W"]:
    """Pixel (x, y) from (a x + b y + c, d x + e y + f) of the image, as `Image.transform(AFFINE)` does; `fill` where
    that is outside."""
    height, width = images.shape[-2:]
    a, b, c, d, e, f = (maps[:, i, None, None] for i in range(6))
    y, x = (torch.arange(n, dtype=torch.float32, device=images.device) + 0.5 for n in (height, width))
    across, down = a * x + b * y[:, None] + c, d * x + e * y[:, None] + f
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    left, top = (across - 0.5).floor(), (down - 0.5).floor()
    taps = _cubic_taps if cubic else _linear_taps
    made = torch.zeros_like(images)
    flat = images.flatten(2)
    columns = taps(across - 0.5 - left)
    for offset, weight in taps(down - 0.5 - top):
        row = (top + offset).clamp(0, height - 1)
        for step, share in columns:
            places = (row * width + (left + step).clamp(0, width - 1)).long()
            values = flat.gather(2, places.flatten(1)[:, None].expand(-1, 3, -1)).view_as(images)
            made += (weight * share)[:, None] * values
    made = (made + EDGE).floor_().clamp_(0, 255)
    return torch.where(inside[:, None], made, fill[:, :, None, None])


def _linear_taps(x: Tensor) -> list[tuple[int, Tensor]]:
    return [(0, 1 - x), (1, x)]


def _cubic_taps(x: Tensor) -> list[tuple[int, Tensor]]:
    """Weights of the four neighbours, with the parameter -1 of Pillow's transforms (its resize has -0.5)."""
    square, cube = x * x, x * x * x
    return [(-1, -x + 2 * square - cube), (0, 1 - 2 * square + cube), (1, x + square - cube), (2, cube - square)]


def rotation(degrees: float, width: int, height: int) -> tuple[float, float, float, float, float, float]:
    """The map of `Image.rotate` about the centre."""
    angle = -math.radians(degrees % 360)
    a, b, d, e = (round(x, 15) for x in (math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle)))
    x, y = width / 2, height / 2
    return a, b, x - a * x - b * y, d, e, y - d * x - e * y
