"""Pictures for contrastive training: read once into memory, cropped and coloured as batches.

Sources: a folder of WebDataset tars (`train*.tar`) with a `classes.jsonl`, one such tar, an image folder (one
folder a class), or a JSONL of pictures with captions.
"""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageOps
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.tokens.image import Preprocessing, find_images, read_image
from multimodal.train.captions import Concept, read_classes

SMALL, LARGE = 64, 112


@dataclass
class PictureSet:
    """Square pictures of one size, and for each the index of its concept."""

    pixels: UInt8[Tensor, "N 3 S S"]
    groups: Int[Tensor, "N"]
    concepts: list[Concept]


def read_pictures(source: Path, size: int, extra: dict[str, Concept]) -> PictureSet:
    """All pictures of a source, the central square of each at `size` pixels a side."""
    pixels, groups, known = [], [], {}
    for picture, identity, concept in entries(source, extra):
        pixels.append(square(read_image(picture), size))
        groups.append(known.setdefault(identity, (len(known), concept))[0])
    return PictureSet(torch.stack(pixels), torch.tensor(groups), [concept for _, concept in known.values()])


def read_sets(sources: list[Path], extra: dict[str, Concept]) -> list[PictureSet]:
    """Each source as a set, with groups that count on through all of them. Tars hold small pictures, kept at
    `SMALL` pixels a side, other sources are kept at `LARGE`."""
    sets, known = [], 0
    for source in sources:
        tars = source.suffix == ".tar" or any(source.glob("train*.tar"))
        pictures = read_pictures(source, SMALL if tars else LARGE, extra)
        pictures.groups += known
        known += len(pictures.concepts)
        print(f"{source}: {len(pictures.pixels)} pictures of {len(pictures.concepts)} concepts", flush=True)
        sets.append(pictures)
    return sets


def entries(source: Path, extra: dict[str, Concept]) -> Iterator[tuple[Path | bytes, str, Concept]]:
    """Each picture of a source with its class id (its file name where it has captions) and its concept.

    `extra` names classes by id: names that replace the known ones, hypernyms to put before them. Raises
    UsageError for a source of no known form or without pictures."""
    if source.suffix == ".jsonl":
        found = _caption_entries(source)
    elif source.suffix == ".tar":
        found = _tar_entries([source], read_classes(source.with_name("classes.jsonl")))
    elif source.is_dir() and (tars := sorted(source.glob("train*.tar"))):
        found = _tar_entries(tars, read_classes(source / "classes.jsonl"))
    elif source.is_dir():
        found = _folder_entries(source)
    else:
        raise UsageError(f"{source}: no .tar, .jsonl or folder of pictures")
    empty = True
    for picture, identity, concept in found:
        empty = False
        yield picture, identity, concept.extended(extra.get(identity))
    if empty:
        raise UsageError(f"{source}: no pictures (0 found)")


def square(picture: Image.Image, size: int) -> UInt8[Tensor, "3 S S"]:
    fitted = picture if picture.size == (size, size) else ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()


def _tar_entries(tars: list[Path], classes: dict[str, Concept]) -> Iterator[tuple[bytes, str, Concept]]:
    """WebDataset: members that share a stem are one sample, of a picture and a `.cls` (class id)."""
    for path in tars:
        with tarfile.open(path) as file:
            sample: dict[str, bytes] = {}
            stem = ""
            for member in file:
                name, _, ending = member.name.partition(".")
                sample = sample if name == stem else {}
                stem = name
                sample["cls" if ending == "cls" else "picture"] = file.extractfile(member).read()
                if len(sample) == 2:
                    identity = sample["cls"].decode().strip()
                    if identity not in classes:
                        raise UsageError(f"{path}: {member.name} is of class {identity!r}, which classes.jsonl lacks")
                    yield sample["picture"], identity, classes[identity]


def _folder_entries(folder: Path) -> Iterator[tuple[Path, str, Concept]]:
    for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
        for path in find_images([str(inner)]):
            yield path, inner.name, Concept((inner.name.replace("_", " "),))


def _caption_entries(path: Path) -> Iterator[tuple[Path, str, Concept]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        captions = tuple(caption.removesuffix(" .").strip() for caption in row["captions"])
        yield path.parent / row["file_name"], row["file_name"], Concept(captions, whole=True)


def draw_batch(
    sets: list[PictureSet], count: int, smallest: float, strength: float, record: Preprocessing
) -> tuple[Float[Tensor, "B 3 H W"], Int[Tensor, "B"]]:
    """Pictures drawn evenly from all sets, augmented, and their groups."""
    ends = torch.tensor([len(s.pixels) for s in sets]).cumsum(0)
    places = torch.randint(int(ends[-1]), (count,))
    images, groups = [], []
    for start, end, pictures in zip([0, *ends[:-1].tolist()], ends.tolist(), sets, strict=True):
        mine = places[(places >= start) & (places < end)] - start
        if len(mine):
            images.append(augment(pictures.pixels[mine], record, smallest, strength))
            groups.append(pictures.groups[mine])
    return torch.cat(images), torch.cat(groups)


def augment(
    pixels: UInt8[Tensor, "B 3 S S"], record: Preprocessing, smallest: float, strength: float
) -> Float[Tensor, "B 3 H W"]:
    """Random crop of `smallest`..1 of the area with flip, turn and shear, then brightness, contrast, saturation and
    now and then grey, and the record's normalisation. A batch is one grid sampling and one matrix product."""
    count, side = len(pixels), pixels.shape[-1]
    images = pixels.float().div_(255)
    soft = torch.rand(count) < 0.15 * strength  # a coarser picture, such as a thumbnail
    if soft.any():
        images[soft] = F.interpolate(F.avg_pool2d(images[soft], 2), size=(side, side), mode="bilinear")
    crops = F.grid_sample(
        images, F.affine_grid(_placements(count, smallest, strength), [count, 3, *record.size], align_corners=False),
        padding_mode="reflection", align_corners=False,
    )  # fmt: skip
    return _coloured(crops, record, strength)


def _placements(count: int, smallest: float, strength: float) -> Float[Tensor, "B 2 3"]:
    """Maps from output to input coordinates, both -1..1."""

    def spread(width: float) -> Tensor:
        return (torch.rand(count) * 2 - 1) * width

    area = torch.rand(count) * (1 - smallest) + smallest
    aspect = spread(0.29).exp()  # 3:4 to 4:3
    wide, high = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    angle, shear = spread(0.2 * strength), spread(0.15 * strength)
    mirror = torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    rows = [
        wide * mirror * angle.cos(), high * (shear - angle.sin()), (1 - wide) * spread(1.0),
        wide * mirror * angle.sin(), high * angle.cos(), (1 - high) * spread(1.0),
    ]  # fmt: skip
    return torch.stack(rows, 1).view(count, 2, 3)


def _coloured(images: Float[Tensor, "B 3 H W"], record: Preprocessing, strength: float) -> Float[Tensor, "B 3 H W"]:
    """All colour changes are linear in RGB, so they and the normalisation are one 3x3 matrix and an offset."""
    count = len(images)
    gain, contrast, colour = (1 + (torch.rand(3, count) * 2 - 1) * 0.4 * strength)[..., None, None]
    colour = torch.where(torch.rand(count, 1, 1) < 0.1 * strength, 0.0, colour)
    grey = torch.tensor([0.299, 0.587, 0.114]).expand(3, 3)
    matrix = colour * torch.eye(3) + (1 - colour) * grey
    middle = (images.mean((2, 3)) @ grey[0])[:, None, None]
    std = torch.tensor(record.std)[:, None]
    offset = ((1 - contrast) * middle * gain - torch.tensor(record.mean)[:, None]) / std
    return torch.baddbmm(offset, gain * contrast * matrix / std, images.flatten(2)).view_as(images)
