"""Videos among images: a row for each sampled frame, or one for the whole clip."""

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.errors import VideoError
from multimodal.tasks.encode.attempts import OF_ALL, item_error
from multimodal.tasks.encode.images import ImageBatch, name_of
from multimodal.tasks.encode.loaded import Item
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess
from multimodal.tokens.video.names import FrameName, is_video
from multimodal.tokens.video.options import ClipOptions, VideoOptions
from multimodal.tokens.video.reading import frames

Batches = Callable[[Iterable[Item]], Iterator[Any]]
SourceOf = Callable[[Item], Any]


class Clip(NamedTuple):
    """A video that gives one result, and the batches of its frames, to be read before the next item."""

    item: Item
    batches: Iterator[ImageBatch]


class FramePreparation(NamedTuple):
    """Preparation of frames for a model: `prepare` gives the pixels of one, `join` those of a batch."""

    prepare: Callable[[Image.Image], Float[Tensor, "3 _ _"]]
    batch_size: int
    join: Callable[[list[Tensor]], Any] = torch.stack


def plain_frames(record: Preprocessing, batch_size: int) -> FramePreparation:
    return FramePreparation(lambda image: preprocess(image, record), batch_size)


def with_videos(
    items: Iterable[Item], of_images: Batches, preparation: FramePreparation, options: ClipOptions,
    source_of: SourceOf, done: Container[Any] = (),
) -> Iterator[Any]:  # fmt: skip
    """Yield the batches that `of_images` makes of images and, in the order of the items, those of the frames of each
    video: ImageBatch, or a Clip for each video with `per_clip`. A batch has frames of one video, so that its results do
    not depend on other items. Frames have a FrameName in place of their path; a batch, or a Clip, of which all keys are
    `done` is left out."""
    for videos, run in groupby(items, lambda item: is_video(item.source)):
        if not videos:
            yield from of_images(run)
            continue
        for item in run:
            parts = frame_batches(item, preparation, options, source_of)
            if not options.per_clip:
                yield from (part for part in parts if part.refused or not all(one.key in done for one in part.read))
            elif item.key not in done:
                yield Clip(item, parts)


def clip_mean(batches: Iterable[ImageBatch], encode: Callable[[Any], Float[Tensor, "B X"]]) -> Float[Tensor, "1 X"]:
    """Mean of the frames' rows of `encode(pixels)`. Raises the error of a video that cannot be read."""
    total, count = torch.zeros((), dtype=torch.float32, device="cpu"), 0
    for batch in checked_batches(batches):
        rows = encode(batch.pixels).float().cpu()
        total, count = total + rows.sum(0, keepdim=True), count + len(rows)
    return total / count


def checked_batches(batches: Iterable[ImageBatch]) -> Iterator[ImageBatch]:
    """The batches of a clip. Raises the error of a video that cannot be read."""
    for batch in batches:
        for _, error in batch.refused:
            raise error
        yield batch


def time_of(name: str) -> dict[str, float]:
    """The `time` of a frame's result, by its name; {} for an image."""
    return {"time": round(name.time, 3)} if isinstance(name, FrameName) else {}


def frame_batches(
    item: Item, preparation: FramePreparation, options: VideoOptions, source_of: SourceOf = lambda item: item.source
) -> Iterator[ImageBatch]:
    """Frames of a video, or the error that ends it."""
    names: list[Item] = []
    pixels: list[Tensor] = []
    refused = []
    try:
        for frame in frames(source_of(item), options):
            pixels.append(preparation.prepare(frame.image))
            names.append(_frame_of(item, frame.time))
            if len(names) == preparation.batch_size:
                yield ImageBatch(names, preparation.join(pixels), [])
                names, pixels = [], []
    except OF_ALL:
        raise
    except Exception as error:
        refused.append((item, item_error(error, name_of(item), VideoError)))
    if names or refused:
        yield ImageBatch(names, preparation.join(pixels) if pixels else torch.empty(0), refused)


def _frame_of(item: Item, time: float) -> Item:
    key = FrameName(str(item.key), time) if isinstance(item.key, str | Path) else (item.key, time)
    return Item(key, FrameName(name_of(item), time), item.position)
