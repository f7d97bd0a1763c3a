"""Images to pixels to patches: a checkpoint's preprocessing record and its application.

`preprocess` equals the evaluation transforms of open_clip and timm to the bit, with Pillow alone (torchvision takes
seconds to import).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Float32
from PIL import Image
from torch import Tensor

from multimodal.errors import CheckpointError, ImageError
from multimodal.system.files import shown
from multimodal.system.records import to_record
from multimodal.tokens.image import exact_resize
from multimodal.tokens.image.exact_resize import Cut, level_table
from multimodal.tokens.image.reading import to_rgb

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

MOST_PIXELS = 1 << 24  # after resizing; 200 MB as float32
ACCURACY = 1e-5  # of NaFlex's ratio between two sizes
MOST_EDGE = 4096  # Idefics3's limit of the longest edge
MOST_WHOLE = 1 << 27  # of an image padded to a square, or resized for a crop; 512 MB as Pillow's RGB

Resize = Literal["shortest", "squash", "longest", "square"]
Interpolation = Literal["bicubic", "bilinear", "lanczos"]
Offset = Literal["round", "floor"]
Division = Literal["fit", "split", "whole"]


@dataclass(frozen=True)
class Tiling:
    """Division into tiles of `Preprocessing.size`, beside an overview of the whole image. Raises CheckpointError.

    `fit` (LLaVA-OneVision): the aspect is kept in the best of `sizes` (height, width), padded with black; the overview
    comes first. At most about `most` tiles' patches are kept. `split` (Idefics3): the longest edge becomes `longest`,
    then both edges whole tiles; the overview comes last. `whole`: Idefics3's overview alone. `video`: mean and standard
    deviation of a video's frames, which have no tiles, where they are not those of images."""

    division: Division
    sizes: tuple[tuple[int, int], ...] = ()
    most: int = 9
    longest: int = 0
    video: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None

    def __post_init__(self) -> None:
        good = {
            "division": self.division in get_args(Division),
            "sizes": bool(self.sizes) == (self.division == "fit")
            and all(min(size) > 0 and math.prod(size) <= MOST_PIXELS for size in self.sizes),
            "most": self.most > 0,
            "longest": 0 <= self.longest <= MOST_EDGE and bool(self.longest) == (self.division != "fit"),
            "video": self.video is None or all(value > 0 for value in self.video[1]),
        }
        for key, usable in good.items():
            if not usable:
                raise CheckpointError(f"tiling: invalid {key} ({getattr(self, key)!r:.60})")


@dataclass(frozen=True)
class Preprocessing:
    """Conversion of images to a model's pixels. Raises CheckpointError for an invalid field."""

    size: tuple[int, int]  # height, width in pixels
    # shortest edge then crop, both edges (changes the aspect), longest edge then pad, or pad to a square of the mean
    # colour then both edges (LLaVA 1.5)
    resize: Resize
    interpolation: Interpolation
    mean: tuple[float, float, float]  # of RGB in 0..1
    std: tuple[float, float, float]
    fill: int  # 0..255, the padding of "longest"
    crop: float  # timm's crop_pct: resize to size / crop, then centre crop; 1.0 for CLIP
    offset: Offset = "round"  # of a crop that is half a pixel off the centre: torchvision's, or transformers' "floor"
    tiling: Tiling | None = None  # of `size` each

    def __post_init__(self) -> None:
        _check(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON data, as `from_record` reads it."""
        return to_record(self)

    def replace(self, **changes: Any) -> "Preprocessing":
        """Changed copy, e.g. `replace(size=native_size(image, 16, 256), resize="squash")`."""
        return dataclasses.replace(self, **changes)


def preprocess(
    image: Image.Image, record: Preprocessing, out: Float32[np.ndarray, "3 H W"] | None = None
) -> Float[Tensor, "3 H W"]:
    """Resize, crop or pad to `record.size` and normalize: (rgb / 255 - mean) / std, written to `out` if given.

    Equals open_clip's `image_transform_v2(is_train=False)` for all resize modes, and timm's
    `create_transform(is_training=False, crop_pct=record.crop)` for "shortest". All images become RGB before they are
    resized, in open_clip those of other modes (palettes, CMYK, 1 bit) after it. Raises ImageError.
    """
    rgb = to_rgb(image)
    rgb = squared(rgb, record.mean) if record.resize == "square" else rgb
    cut, dense = _cut(rgb, record), out is None or out.flags.c_contiguous
    can = dense and exact_resize.can_do(cut, rgb.size, record.interpolation)
    if can and (resize := exact_resize.compiled.get()) is not None:
        pixels = np.empty((3, *record.size), np.float32) if out is None else out
        resize(np.asarray(rgb), cut, record.interpolation, level_table(record.mean, record.std), pixels)
        return torch.from_numpy(pixels)
    return normalized(_centre(resized(rgb, _resized_edges(*rgb.size, record), record), record), record, out)


def normalized(
    rgb: Image.Image, record: Preprocessing, out: Float32[np.ndarray, "3 H W"] | None = None
) -> Float[Tensor, "3 H W"]:
    """(rgb / 255 - mean) / std of an image at its size, written to `out` if given."""
    pixels = np.empty((3, rgb.height, rgb.width), np.float32) if out is None else out
    # NumPy, plane by plane: stays in the CPU cache, and reader threads start no PyTorch threads
    for plane, band, mean, std in zip(pixels, rgb.split(), record.mean, record.std, strict=True):
        np.divide(np.asarray(band), np.float32(255), out=plane)
        plane -= np.float32(mean)
        plane /= np.float32(std)
    return torch.from_numpy(pixels)


def squared(rgb: Image.Image, mean: Sequence[float]) -> Image.Image:
    """The image in the middle of a square of the colour `mean` (LLaVA 1.5, Liu et al. 2023). Raises ImageError."""
    side = max(rgb.size)
    if rgb.width == rgb.height:
        return rgb
    if side**2 > MOST_WHOLE:
        raise ImageError(f"image: {rgb.width}x{rgb.height} is too large to pad to a square (limit {MOST_WHOLE} pixels)")
    made = Image.new("RGB", (side, side), tuple(int(255 * part) for part in mean))
    made.paste(rgb, ((side - rgb.width) // 2, (side - rgb.height) // 2))
    return made


def native_size(image: Image.Image, patch: int | tuple[int, int], max_tokens: int) -> tuple[int, int]:
    """(H, W) in whole patches at the image's aspect ratio with at most `max_tokens` patches.

    As in NaFlex (SigLIP 2, arXiv:2502.14786): both edges are scaled by one ratio and rounded up to whole patches. The
    ratio is bisected as in timm and transformers, which for 1 of 10,000 sizes stops short of a larger grid.
    """
    if max_tokens < 1:
        raise ImageError(f"max_tokens: must be at least 1 (got {max_tokens})")
    patches = _pair(patch)
    grid = lambda ratio: [math.ceil(edge * ratio / side) for edge, side in zip(image.size[::-1], patches, strict=True)]
    low, high = ACCURACY / 10, 100.0
    while high - low >= ACCURACY:
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(grid(middle)) <= max_tokens else (low, middle)
    rows, columns = grid(low)
    return rows * patches[0], columns * patches[1]


def placement(width: int, height: int, record: Preprocessing) -> tuple[int, int, int, int]:
    """(width, height, left, top) of a resized image relative to `record.size`, in pixels: `left` and `top` are positive
    for padding, negative for a crop."""
    if record.resize == "square":
        scale = [edge / max(width, height) for edge in record.size]  # down, across
        left, top = ((max(width, height) - edge) // 2 for edge in (width, height))
        return round(width * scale[1]), round(height * scale[0]), round(left * scale[1]), round(top * scale[0])
    new_h, new_w = _resized_edges(width, height, record)
    starts = []
    for new, edge in ((new_w, record.size[1]), (new_h, record.size[0])):
        starts.append((edge - new) // 2 if new <= edge else -_excess(new, edge, record))
    return new_w, new_h, starts[0], starts[1]


def _cut(image: Image.Image, record: Preprocessing) -> Cut:
    """The resized image's central part; beyond its edges where it is padded. Raises ImageError for a resized image
    that would not fit in memory."""
    height, width = _resized_edges(image.width, image.height, record)
    if height * width > MOST_WHOLE:
        made = f"{width}x{height} when resized, limit {MOST_WHOLE} pixels"
        raise ImageError(f"image: {image.width}x{image.height} is too long and thin ({made})")
    left, top = (_excess(new, edge, record) for new, edge in ((width, record.size[1]), (height, record.size[0])))
    return Cut((width, height), (left, top, left + record.size[1], top + record.size[0]))


def resized(rgb: Image.Image, size: tuple[int, int], record: Preprocessing) -> Image.Image:
    """The whole image at `size` (H, W)."""
    height, width = size
    same = (rgb.height, rgb.width) == (height, width)
    return rgb if same else rgb.resize((width, height), Image.Resampling[record.interpolation.upper()])


def _resized_edges(width: int, height: int, record: Preprocessing) -> tuple[int, int]:
    """(height, width) before cropping or padding."""
    target_h, target_w = (math.floor(edge / record.crop) for edge in record.size)
    if record.resize in ("squash", "square"):
        return target_h, target_w
    if record.resize == "shortest" and target_h == target_w:
        # torchvision's Resize(int) truncates the longer edge; the keep-ratio resize below rounds it.
        short = min(height, width)
        return int(target_h * height / short), int(target_w * width / short)
    pick = max if record.resize == "longest" else min
    ratio = pick(height / target_h, width / target_w)
    new_h, new_w = (max(1, round(edge / ratio)) for edge in (height, width))
    return new_h, new_w


def _excess(edge: int, size: int, record: Preprocessing) -> int:
    """Pixels before a central crop."""
    return (edge - size) // 2 if record.offset == "floor" else round((edge - size) / 2)


def _centre(image: Image.Image, record: Preprocessing) -> Image.Image:
    """Centre of `record.size`: pad with missing // 2 before, then crop."""
    height, width = record.size
    if (image.height, image.width) == record.size:
        return image
    if image.width < width or image.height < height:
        fill = record.fill if record.resize == "longest" else 0
        padded = Image.new("RGB", (max(width, image.width), max(height, image.height)), (fill, fill, fill))
        padded.paste(image, ((padded.width - image.width) // 2, (padded.height - image.height) // 2))
        image = padded
    left, top = _excess(image.width, width, record), _excess(image.height, height, record)
    return image.crop((left, top, left + width, top + height))


def _pair(patch: int | tuple[int, int]) -> tuple[int, int]:
    height, width = (patch, patch) if isinstance(patch, int) else patch
    if height < 1 or width < 1:
        raise ImageError(f"patch: must be at least 1 pixel (got {height}x{width})")
    return height, width


def _check(fields: dict[str, Any]) -> None:
    size, std, fill, crop = (fields[key] for key in ("size", "std", "fill", "crop"))
    good = {
        "size": _numbers(size, 2, int) and min(size) > 0 and math.prod(size) <= MOST_PIXELS,
        "resize": fields["resize"] in get_args(Resize),
        "interpolation": fields["interpolation"] in get_args(Interpolation),
        "tiling": fields["tiling"] is None or _in_tiles(fields["tiling"], size),
        "offset": fields["offset"] in get_args(Offset),
        "mean": _numbers(fields["mean"], 3, float) and max(map(abs, fields["mean"])) <= 1000,
        "std": _numbers(std, 3, float) and min(std) >= 1e-6 and max(std) <= 1000,
        "fill": _numbers((fill,), 1, int) and 0 <= fill <= 255,
        "crop": _numbers((crop,), 1, float) and 0.05 <= crop <= 1,
    }
    for key, usable in good.items():
        if not usable:
            raise CheckpointError(f"preprocessing: invalid {key} ({shown(fields[key])})")


def _in_tiles(tiling: Tiling, tile: tuple[int, int]) -> bool:
    """True if its sizes are whole tiles, and tiles of a split are square."""
    whole = min(tile) > 0 and all(height % tile[0] == width % tile[1] == 0 for height, width in tiling.sizes)
    return whole and (tiling.division == "fit" or tile[0] == tile[1])


def _numbers(values: Any, length: int, kind: type) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) == length
        and all(type(v) is kind and math.isfinite(v) for v in values)
    )
