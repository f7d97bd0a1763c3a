"""Pictures as the picture tasks take them: paths, bytes or PIL images, decoded ahead of the model."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.errors import ImageError
from multimodal.tokens.image import Preprocessing, preprocess, read_image


class Pictures(NamedTuple):
    """A batch: those that could be read, their pixels in the same order, and why the others could not."""

    read: list[Any]
    pixels: Float[Tensor, "B 3 H W"]
    refused: list[tuple[Any, ImageError]]


def batches(
    images: Iterable[Any], record: Preprocessing, batch_size: int = 32, workers: int | None = None
) -> Iterator[Pictures]:
    """`batch_size` pictures at a time, in their order, decoded by `workers` threads (default: one a core) up to two
    batches ahead. A picture that cannot be read is one of `refused`; the others go on."""
    workers = workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[tuple[Any, Future]] = deque()
        try:
            for image in images:
                ahead.append((image, pool.submit(pixels_of_one, image, record)))
                if len(ahead) == 3 * batch_size:
                    yield _batch([ahead.popleft() for _ in range(batch_size)], record)
            while ahead:
                yield _batch([ahead.popleft() for _ in range(min(batch_size, len(ahead)))], record)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _batch(items: list[tuple[Any, Future]], record: Preprocessing) -> Pictures:
    read, pixels, refused = [], [], []
    for image, future in items:
        try:
            pixels.append(future.result())
            read.append(image)
        except ImageError as error:
            refused.append((image, error))
    return Pictures(read, torch.stack(pixels) if pixels else torch.zeros(0, 3, *record.size), refused)


def pixels_of_one(image: Any, record: Preprocessing) -> Float[Tensor, "3 H W"]:
    """One picture read and preprocessed. Raises ImageError."""
    return preprocess(image if isinstance(image, Image.Image) else read_image(image), record)


def pixels_of(images: Sequence[Any], record: Preprocessing) -> Float[Tensor, "B 3 H W"]:
    """All pictures read and preprocessed. Raises ImageError."""
    return torch.stack([pixels_of_one(image, record) for image in images])


def name_of(image: Any) -> str:
    """The path as it was given, else what kind of object it was."""
    if isinstance(image, str | Path):
        return str(image)
    return getattr(image, "filename", "") or f"<{type(image).__name__}>"
