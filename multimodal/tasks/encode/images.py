"""Batches of images (see `as_image`), decoded ahead of the model."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor

from multimodal.errors import ImageError, MultimodalError, UsageError
from multimodal.system.files import shown
from multimodal.tasks.encode.attempts import OF_ALL, item_error
from multimodal.tasks.encode.loaded import Item
from multimodal.tokens.image.arrays import as_image
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess


class ImageBatch(NamedTuple):
    """Readable images, their pixels in the same order (of images with their own sizes one by one), and errors of the
    others."""

    read: list[Any]
    pixels: Float[Tensor, "B 3 H W"] | tuple[Float[Tensor, "3 _ _"], ...]
    refused: list[tuple[Any, MultimodalError]]


def batches(
    images: Iterable[Any], record: Preprocessing, batch_size: int = 32, workers: int | None = None,
    source_of: Callable[[Any], Any] = lambda image: image,
) -> Iterator[ImageBatch]:  # fmt: skip
    """Batches in order, decoded by `workers` threads (default: one per core) up to two batches ahead. Unreadable images
    are in `refused`. Full-size images are in memory only while a thread reads them.

    Raises UsageError for a `batch_size` or `workers` below 1."""

    def rows() -> Iterator[_Row]:
        """A row of its batch's tensor for each image, so that nothing is stacked."""
        remaining = iter(images)
        while several := list(islice(remaining, batch_size)):
            shape, pinned = (len(several), 3, *record.size), torch.cuda.is_initialized()
            pixels = torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
            yield from (_Row(image, pixels, index) for index, image in enumerate(several))

    def fill(row: _Row) -> int:
        pixels_of_one(source_of(row.image), record, row.pixels[row.index].numpy())
        return row.index

    for items in ahead(rows(), fill, batch_size, workers):
        read, refused = settled((row.image, future) for row, future in items)
        pixels = items[0][0].pixels
        pixels = pixels[[index for _, index in read]] if refused else pixels
        yield ImageBatch([image for image, _ in read], pixels, refused)


def ahead(
    images: Iterable[Any], work: Callable[[Any], Any], batch_size: int, workers: int | None = None
) -> Iterator[list[tuple[Any, Future]]]:
    """Batches of (image, future of `work`), started up to two batches ahead. Closing the iterator stops the threads and
    cancels what has not started."""
    check_reading(batch_size, workers)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if workers is None else workers) as pool:
        waiting: deque[tuple[Any, Future]] = deque()
        try:
            for image in images:
                waiting.append((image, pool.submit(work, image)))
                if len(waiting) == 3 * batch_size:
                    yield [waiting.popleft() for _ in range(batch_size)]
            while waiting:
                yield [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def check_reading(batch_size: int, workers: int | None) -> None:
    for name, value in (("batch_size", batch_size), ("workers", 1 if workers is None else workers)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise UsageError(f"must be an integer of at least 1 (got {shown(value)})", argument=name)


class _Row(NamedTuple):
    image: Any
    pixels: Float[Tensor, "B 3 H W"]
    index: int


def settled(items: Iterable[tuple[Any, Future]]) -> tuple[list[tuple[Any, Any]], list[tuple[Any, MultimodalError]]]:
    """Split (image, future) into (image, result) and (image, error)."""
    read, refused = [], []
    for image, future in items:
        try:
            read.append((image, future.result()))
        except OF_ALL:
            raise
        except Exception as error:
            refused.append((image, item_error(error, name_of(image), ImageError)))
    return read, refused


def pixels_of_one(
    image: Any, record: Preprocessing, out: Float32[np.ndarray, "3 H W"] | None = None
) -> Float[Tensor, "3 H W"]:
    """Read and preprocess one image, into `out` if given. Raises ImageError."""
    return preprocess(as_image(image), record, out)


def pixels_of(images: Sequence[Any], record: Preprocessing) -> Float[Tensor, "B 3 H W"]:
    """Read and preprocess images. Raises ImageError."""
    return torch.stack([pixels_of_one(image, record) for image in images])


def name_of(image: Any) -> str:
    """Path of an image (a FrameName stays one), or its type in angle brackets."""
    if isinstance(image, Item):
        image = image.source
    if isinstance(image, str | Path):
        return image if isinstance(image, str) else str(image)
    return getattr(image, "filename", "") or f"<{type(image).__name__}>"
