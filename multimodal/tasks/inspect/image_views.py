"""Attention of an image model over one image, or over many: the files of folders, the frames of videos."""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.errors import UsageError
from multimodal.models.vit import ViT
from multimodal.tasks.encode.images import pixels_of_one
from multimodal.tasks.inspect import numbers, plots
from multimodal.tasks.inspect.alignment import AlignmentRequest
from multimodal.tasks.inspect.maps import image_attention, tower_of
from multimodal.tasks.inspect.options import ViewOptions
from multimodal.tasks.inspect.views import View, rounded, view
from multimodal.tokens.image.reading import find_images, read_image, to_rgb
from multimodal.tokens.video.names import is_video
from multimodal.tokens.video.options import EVENLY, VideoOptions
from multimodal.tokens.video.reading import frames
from multimodal.weights.conventions import known_preprocessing
from multimodal.weights.folder import Checkpoint

DINO_OFFSET = 0.1
KEPT = 480  # pixels of an image's longer side in the figure


class ImageMap(NamedTuple):
    """Attention from the class token (or the mean of the patches) to an image's patches."""

    name: str
    image: Image.Image
    map: Float[Tensor, "rows columns"]


def images_view(checkpoint: Checkpoint, what: str, inputs: Sequence[str], options: ViewOptions) -> View:
    """`attention` over each input, or mean attention `distance`, averaged over all (Dosovitskiy et al. 2021, figure 7).
    Raises UsageError, ImageError, CheckpointError."""
    checkpoint = sized(checkpoint, options)
    first = inputs[0]
    if len(inputs) == 1 and not (Path(first).is_dir() or is_video(first) or glob.has_magic(first)):
        return view(checkpoint, what, AlignmentRequest(first), options)
    images = named_images(inputs)
    return _distances(checkpoint, images) if what == "distance" else _attentions(checkpoint, images, options)


def sized(checkpoint: Checkpoint, options: ViewOptions) -> Checkpoint:
    """The checkpoint for images of `options.size`, its positions interpolated as `options.interpolation` names. Raises
    UsageError for a side that is no multiple of the patch."""
    tower, side = tower_of(checkpoint.model), options.size
    known_preprocessing(checkpoint)
    own = None if tower.config.position_offset == DINO_OFFSET else tower.config.position_offset
    tower.config = replace(tower.config, position_offset=DINO_OFFSET if options.interpolation == "dino" else own)
    if side is None:
        return checkpoint
    if side % tower.config.patch:
        raise UsageError(
            f"must be a multiple of the patch of {tower.config.patch} pixels (got {side})", argument="size"
        )
    if tower.config.fixed and (side, side) != tuple(tower.config.image):
        own = "x".join(map(str, tower.config.image))
        raise UsageError(f"must be the model's {own}, which its relative positions fit (got {side})", argument="size")
    return replace(checkpoint, preprocessing=replace(checkpoint.preprocessing, size=(side, side)))


def named_images(inputs: Sequence[str]) -> Iterator[tuple[str, Image.Image]]:
    """Images of files, folders and patterns, and 16 frames spread over each video. Raises UsageError, ImageError."""
    for name in inputs:
        if is_video(name):
            for frame in frames(name, VideoOptions(max_frames=EVENLY)):
                yield f"{Path(name).name} {frame.time:.1f} s", frame.image
            continue
        for path in find_images([name]):
            yield path.name, to_rgb(read_image(path))


def _attentions(checkpoint: Checkpoint, images: Iterator[tuple[str, Image.Image]], options: ViewOptions) -> View:
    """Maps of one layer, of a head or the mean of all."""
    tower, found = tower_of(checkpoint.model), []
    if options.layer == "all":
        raise UsageError("one layer of several images: a number (got 'all')", argument="layer")
    for name, image in images:
        maps, seen = _maps(tower, checkpoint, image, options)
        image.thumbnail((KEPT, KEPT))
        found.append(ImageMap(name, image, maps))
        layer = seen
    record = {
        "what": "attention", "of": "class token" if tower.config.class_token else "mean of patches", "layer": layer,
        "head": options.head, "images": [{"name": one.name, "map": rounded(one.map)} for one in found],
    }  # fmt: skip
    lines = ["strongest patch (row, column) and its share of the attention to patches"]
    for one in found:
        at = int(one.map.argmax())
        place = divmod(at, one.map.shape[1])
        lines.append(f"{one.name}: {place}, {float(one.map.max() / one.map.sum()):.3f}")
    head = "mean of the heads" if options.head is None else f"head {options.head}"
    title = f"{Path(checkpoint.source).name}: attention of the {record['of']}, layer {layer}, {head}"
    return View(record, lines, lambda: plots.plot_image_maps(
        [(one.name, one.image, one.map) for one in found], checkpoint.preprocessing, tower.config.patch, title
    ))  # fmt: skip


def _maps(
    tower: ViT, checkpoint: Checkpoint, image: Image.Image, options: ViewOptions
) -> tuple[Float[Tensor, "rows columns"], int]:
    seen = image_attention(tower, pixels_of_one(image, checkpoint.preprocessing))
    maps = numbers.chosen(seen.weights, options.layer, options.head)
    return numbers.over_image(maps.weights, seen.keys, tower.config.class_token)[0].mean(0), maps.layers[0]


def _distances(checkpoint: Checkpoint, images: Iterator[tuple[str, Image.Image]]) -> View:
    tower = tower_of(checkpoint.model)
    found = [
        numbers.mean_distances(image_attention(tower, pixels_of_one(image, checkpoint.preprocessing)))
        for _, image in images
    ]
    values = torch.stack(found)
    mean, spread = values.mean(0), values.std(0, correction=0)
    record = {"what": "distance", "unit": "pixels", "images": len(found), "distances": rounded(mean),
              "spread": rounded(spread)}  # fmt: skip
    lines = [f"mean attention distance (pixels) over {len(found)} images: rows are layers, columns are heads"]
    lines += [f"{layer:3}  " + " ".join(f"{float(value):8.2f}" for value in row) for layer, row in enumerate(mean)]
    title = f"{Path(checkpoint.source).name}: attention distance over {len(found)} images"
    return View(record, lines, lambda: plots.plot_distances(mean, "pixels", title))
