"""Tiles of an image, for models that see a large one in parts: LLaVA-OneVision's (Li et al. 2024) and Idefics3's
(Laurençon et al. 2024).

Equal to transformers' processors with their Pillow backend. Its torchvision backend resizes tensors, whose values
differ, and may take bicubic for Lanczos."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.tokens.image.preprocessing import Preprocessing, Tiling, normalized, preprocess, resized, squared
from multimodal.tokens.image.reading import to_rgb

FINER = 1.1  # times the most patches a side, from which LLaVA-OneVision's are interpolated down
AROUND, OVERVIEW = "<fake_token_around_image>", "<global-img>"  # Idefics3's
Size = tuple[int, int]  # height, width


class Tiled(NamedTuple):
    """`pixels`: of the overview and the tiles, row by row; `grid`: rows and columns of tiles, (0, 0) for the overview
    alone; `size`: of the image."""

    pixels: Float[Tensor, "N 3 H W"]
    grid: Size
    size: Size


def tiled(image: Image.Image, record: Preprocessing, several: bool = False) -> Tiled:
    """Pixels of an image in tiles, by `record.tiling`. `several`: it is one of several in a text, which LLaVA-OneVision
    sees whole, padded to a square. Raises ImageError."""
    rgb, tiling = to_rgb(image), record.tiling
    size = (rgb.height, rgb.width)
    if tiling is None or (several and tiling.division == "fit"):
        whole = rgb if tiling is None else squared(rgb, record.mean)
        return Tiled(preprocess(whole, record)[None], (0, 0), size)
    if tiling.division == "fit":
        target = best_size(size, tiling.sizes)
        parts, grid = _cut(_fitted(rgb, target, record), record.size)
        parts = [resized(rgb, record.size, record), *parts]
    else:
        longest = split_size(size, tiling.longest)  # two or three resizes, as in training
        rgb, parts, grid = resized(rgb, longest, record), [], (0, 0)
        if tiling.division == "split":
            rgb = resized(rgb, whole_tiles(longest, record.size[0]), record)
            parts, grid = _cut(rgb, record.size)
        parts, grid = (parts, (0, 0)) if grid == (1, 1) else ([*parts, resized(rgb, record.size, record)], grid)
    return Tiled(torch.stack([normalized(part, record) for part in parts]), grid, size)


def markup(marker: str, rows: int, grid: Size, tiling: Tiling | None) -> str:
    """Text of an image with so many rows in all: a `marker` each, with Idefics3's marks around and between tiles."""
    if tiling is None or tiling.division == "fit":
        return marker * rows
    tile = marker * (rows // (grid[0] * grid[1] + 1))
    lines = [
        "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(grid[1])) + "\n"
        for row in range(grid[0])
    ]
    return "".join(lines) + "\n" * bool(lines) + f"{AROUND}{OVERVIEW}{tile}{AROUND}"


def best_size(size: Size, sizes: tuple[Size, ...]) -> Size:
    """The one of `sizes` that keeps most pixels of an image, then wastes fewest (LLaVA-NeXT)."""

    def kept(target: Size) -> tuple[int, int]:
        scale = min(target[1] / size[1], target[0] / size[0])
        used = min(int(size[1] * scale) * int(size[0] * scale), math.prod(size))
        return used, used - math.prod(target)

    return max(sizes, key=kept)


def kept_patches(size: Size, grid: Size, side: int, most: int) -> tuple[Size, Size]:
    """Padding and kept patches of an image of this size in `grid` tiles of `side` x `side` patches.

    Rows and columns of padding on each side, and the rows and columns to which the others are interpolated."""
    rows, columns = grid[0] * side, grid[1] * side
    before = (0, 0)
    if size[1] / size[0] > columns / rows:
        before = ((rows - int(round(size[0] * (columns / size[1]), 7))) // 2, 0)
    else:
        before = (0, (columns - int(round(size[1] * (rows / size[0]), 7))) // 2)
    rows, columns = rows - 2 * before[0], columns - 2 * before[1]
    ratio = math.sqrt(rows * columns / (most * side**2))
    return before, (rows, columns) if ratio <= FINER else (int(rows // ratio), int(columns // ratio))


def split_size(size: Size, longest: int) -> Size:
    """Size with this longest edge, and the other one even (Idefics3)."""
    height, width = size
    aspect = width / height
    if width >= height:
        height, width = int(longest / aspect), longest
        return max(height + height % 2, 1), width
    width, height = int(longest * aspect), longest
    return height, max(width + width % 2, 1)


def whole_tiles(size: Size, side: int) -> Size:
    """Size in whole tiles, the longer edge rounded up first."""
    height, width = size
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / aspect) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * aspect) / side) * side
    return height, width


def _fitted(rgb: Image.Image, target: Size, record: Preprocessing) -> Image.Image:
    """The image at its aspect in the middle of a black one of the size `target`."""
    down, across = target[0] / rgb.height, target[1] / rgb.width
    if across < down:
        size = min(math.ceil(rgb.height * across), target[0]), target[1]
    else:
        size = target[0], min(math.ceil(rgb.width * down), target[1])
    made = Image.new("RGB", (target[1], target[0]))
    made.paste(resized(rgb, size, record), ((target[1] - size[1]) // 2, (target[0] - size[0]) // 2))
    return made


def _cut(rgb: Image.Image, tile: Size) -> tuple[list[Image.Image], Size]:
    rows, columns = rgb.height // tile[0], rgb.width // tile[1]
    boxes = [(x * tile[1], y * tile[0]) for y in range(rows) for x in range(columns)]
    return [rgb.crop((x, y, x + tile[1], y + tile[0])) for x, y in boxes], (rows, columns)
