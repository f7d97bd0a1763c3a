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
from multimodal.tokens.video.options import ClipOptions
from multimodal.tokens.video.reading import frames

Batches = Callable[[Iterable[Any]], Iterator[Any]]


class Clip(NamedTuple):
    """A video that gives one result, and the batches of its frames, to be read before the next item."""

    item: Any
    batches: Iterator[ImageBatch]


class FramePreparation(NamedTuple):
    """Preparation of frames for a model: `prepare` gives the pixels of one, `join` those of a batch."""

    prepare: Callable[[Image.Image], Float[Tensor, "3 _ _"]]
    batch_size: int
    join: Callable[[list[Tensor]], Any] = torch.stack


def plain_frames(record: Preprocessing, batch_size: int) -> FramePreparation:
    return FramePreparation(lambda image: preprocess(image, record), batch_size)


def with_videos(
    items: Iterable[Any], of_images: Batches, preparation: FramePreparation, options: ClipOptions,
    source_of: Callable[[Any], Any] = lambda item: item, done: Container[str] = (),
) -> Iterator[Any]:  # fmt: skip
    """Yield the batches that `of_images` makes of images and, in the order of the items, those of the frames of each
    video: ImageBatch, or a Clip for each video with `per_clip`. A batch has frames of one video, so that its results do
    not depend on other items. Frames have a FrameName in place of their path; a batch of which all are `done` is left
    out."""
    raw = lambda item: item.source if isinstance(item, Item) else item
    for videos, run in groupby(items, lambda item: is_video(raw(item))):
        if not videos:
            yield from of_images(run)
            continue
        for item in run:
            parts = _frame_batches(item, source_of, preparation, options)
            if options.per_clip:
                if not isinstance(item, str) or item not in done:
                    yield Clip(item, parts)
            else:
                yield from (part for part in parts if part.refused or not all(_in(name, done) for name in part.read))


def clip_mean(batches: Iterable[ImageBatch], encode: Callable[[Any], Float[Tensor, "B X"]]) -> Float[Tensor, "1 X"]:
    """Mean of the frames' rows of `encode(pixels)`. Raises the error of a video that cannot be read."""
    total, count = torch.zeros(()), 0
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


def _in(name: Any, done: Container[str]) -> bool:
    return isinstance(name, str) and name in done


def _frame_batches(
    item: Any, source_of: Callable[[Any], Any], preparation: FramePreparation, options: ClipOptions
) -> Iterator[ImageBatch]:
    names: list[Any] = []
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


def _frame_of(item: Any, time: float) -> Any:
    if not isinstance(item, Item):
        return FrameName(str(item), time)
    key = FrameName(str(item.key), time) if isinstance(item.key, str | Path) else (item.key, time)
    return Item(key, FrameName(name_of(item), time), item.position)
