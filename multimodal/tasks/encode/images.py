"""Pictures as the picture tasks take them: paths, bytes or PIL images, decoded ahead of the model."""

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
from PIL import Image
from torch import Tensor

from multimodal.errors import ImageError, UsageError
from multimodal.tasks.encode.attempts import OF_ALL, item_error
from multimodal.tokens.image.preprocessing import Preprocessing, preprocess, read_image


class Pictures(NamedTuple):
    """A batch: those that could be read, their pixels in the same order, and why the others could not."""

    read: list[Any]
    pixels: Float[Tensor, "B 3 H W"]
    refused: list[tuple[Any, ImageError]]


def batches(
    images: Iterable[Any], record: Preprocessing, batch_size: int = 32, workers: int | None = None
) -> Iterator[Pictures]:
    """`batch_size` pictures at a time, in their order, decoded by `workers` threads (default: one a core) up to two
    batches ahead. A picture that cannot be read is one of `refused`; the others go on. Whole pictures are in memory
    only while a thread reads them. Raises UsageError for a `batch_size` or `workers` below 1."""

    def places() -> Iterator[_Place]:
        """Each picture's row in the tensor of its batch, so that a batch need not be put together."""
        given = iter(images)
        while several := list(islice(given, batch_size)):
            pixels = torch.empty(len(several), 3, *record.size, pin_memory=torch.cuda.is_initialized())
            yield from (_Place(image, pixels, row) for row, image in enumerate(several))

    def fill(place: _Place) -> None:
        pixels_of_one(place.image, record, place.pixels[place.row].numpy())

    for items in ahead(places(), fill, batch_size, workers):
        yield _batch(items)


def ahead(
    images: Iterable[Any], work: Callable[[Any], Any], batch_size: int, workers: int | None = None
) -> Iterator[list[tuple[Any, Future]]]:
    """`batch_size` pictures at a time with what threads make of each, begun up to two batches ahead. The threads end
    with the iterator, also one that is given up early; what they have not begun is left undone."""
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if type(batch_size) is not int or type(workers) is not int or min(batch_size, workers) < 1:
        raise UsageError(f"batch_size {batch_size}, workers {workers}: must be at least 1")
    with ThreadPoolExecutor(workers) as pool:
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


class _Place(NamedTuple):
    image: Any
    pixels: Float[Tensor, "B 3 H W"]
    row: int


def _batch(items: list[tuple[_Place, Future]]) -> Pictures:
    read, refused = [], []
    for place, future in items:
        try:
            future.result()
            read.append(place)
        except OF_ALL:
            raise
        except Exception as error:
            refused.append((place.image, item_error(error, name_of(place.image), ImageError)))
    pixels = items[0][0].pixels
    pixels = pixels[[place.row for place in read]] if refused else pixels
    return Pictures([place.image for place in read], pixels, refused)


def pixels_of_one(
    image: Any, record: Preprocessing, out: Float32[np.ndarray, "3 H W"] | None = None
) -> Float[Tensor, "3 H W"]:
    """One picture read and preprocessed, into `out` where it is given. Raises ImageError."""
    return preprocess(image if isinstance(image, Image.Image) else read_image(image), record, out)


def pixels_of(images: Sequence[Any], record: Preprocessing) -> Float[Tensor, "B 3 H W"]:
    """All pictures read and preprocessed. Raises ImageError."""
    return torch.stack([pixels_of_one(image, record) for image in images])


def name_of(image: Any) -> str:
    """The path as it was given, else what kind of object it was."""
    if isinstance(image, str | Path):
        return str(image)
    return getattr(image, "filename", "") or f"<{type(image).__name__}>"
