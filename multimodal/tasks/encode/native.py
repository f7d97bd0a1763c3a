"""Encode images at their native aspect ratio, several sizes in one batch under a token budget.

As in NaFlex (SigLIP 2, arXiv:2502.14786, section 2.4) and NaViT (Dehghani et al. 2023), for any model with learned
positions, which are resampled to each image's grid (bicubic, antialiased, as timm's `NaFlexVit`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from multimodal.errors import ImageError, UsageError
from multimodal.inference.modules import inference_mode
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.system.files import shown
from multimodal.tasks.encode.images import ImageBatch, ahead, name_of, settled
from multimodal.tasks.encode.videos import FramePreparation
from multimodal.tokens.image.arrays import as_image
from multimodal.tokens.image.preprocessing import Preprocessing, native_size, preprocess
from multimodal.tokens.image.reading import to_rgb
from multimodal.weights.encode import image_features, vector_width

MOST = 1 << 14  # patches of an image: attention is quadratic
TOKENS = 2048  # per batch with padding: more is not faster on a CPU


def native_features(
    model: nn.Module, images: Iterable[Any], record: Preprocessing, max_tokens: int | None = None
) -> Float[Tensor, "N D"]:
    """CLIP embeddings (unit vectors) or pooled ViT features of images, resized at their aspect ratio to at most
    `max_tokens` patches (default: as many as the preprocessing makes).

    The result does not depend on the batch; an image of the learned shape gets the vector of the usual preprocessing.
    Raises ImageError for the first image that is unreadable or does not fit, UsageError."""
    vectors = []
    for batch in native_batches(model, images, record, max_tokens):
        for _, error in batch.refused:
            raise error
        vectors.append(encode_native(model, batch.pixels).float().cpu())
    return torch.cat(vectors) if vectors else torch.zeros(0, vector_width(model), dtype=torch.float32, device="cpu")


def native_batches(
    model: nn.Module, images: Iterable[Any], record: Preprocessing, max_tokens: int | None = None,
    batch_size: int = 128, workers: int | None = None, source_of: Callable[[Any], Any] = lambda image: image,
) -> Iterator[ImageBatch]:  # fmt: skip
    """Batches in order, decoded ahead by threads. `source_of`: the image of an item. Raises UsageError for a model of
    one image size, or a limit below 1."""
    most, patch = tokens_of(model, max_tokens, record), vision(model).config.patch
    work = lambda image: native_pixels(source_of(image), record, patch, most)
    for items in ahead(images, work, batch_size, workers):
        read, refused = settled(items)
        yield ImageBatch([image for image, _ in read], tuple(pixels for _, pixels in read), refused)


def native_frames(model: nn.Module, record: Preprocessing, max_tokens: int | None, batch_size: int) -> FramePreparation:
    """Frames of videos for `encode_native`."""
    most, patch = tokens_of(model, max_tokens, record), vision(model).config.patch
    return FramePreparation(lambda image: native_pixels(image, record, patch, most), batch_size, tuple)


def native_pixels(image: Any, record: Preprocessing, patch: int, max_tokens: int) -> Float[Tensor, "3 H W"]:
    """Preprocess one image at its aspect ratio with at most `max_tokens` patches. Raises ImageError."""
    rgb = to_rgb(as_image(image))
    return preprocess(rgb, native_record(rgb, record, patch, max_tokens, name_of(image)))


def native_record(
    image: Image.Image, record: Preprocessing, patch: int, max_tokens: int, name: str = "image"
) -> Preprocessing:
    """Preprocessing that keeps an upright image whole, at its aspect ratio rounded to patches. Raises ImageError for an
    image smaller than a patch or longer than a row of `max_tokens` patches."""
    width, height = image.size
    if min(width, height) < patch:
        raise ImageError(f"{name}: {width}x{height} pixels are smaller than one patch ({patch}x{patch})")
    if max(width, height) > max_tokens * min(width, height):
        raise ImageError(f"{name}: {width}x{height} pixels are longer than a row of {max_tokens} patches")
    return record.replace(size=native_size(image, patch, max_tokens), resize="squash", crop=1.0)


@inference_mode()
def encode_native(
    model: nn.Module, pixels: Sequence[Float[Tensor, "3 _ _"]], token_budget: int = TOKENS
) -> Float[Tensor, "B D"]:
    """Vectors of images of any size, in order. Images are grouped by size: each group, padded to its longest, has at
    most `token_budget` tokens or one image."""
    config, device = vision(model).config, next(model.parameters()).device
    lengths = [config.prefix + (p.shape[1] // config.patch) * (p.shape[2] // config.patch) for p in pixels]
    order = sorted(range(len(pixels)), key=lambda i: (lengths[i], pixels[i].shape[1]))
    groups = _grouped(order, lengths, token_budget)
    made = [image_features(model, [pixels[row] for row in rows]) for rows in groups]
    if not made:
        return torch.zeros(0, vector_width(model), dtype=torch.float32)
    return torch.cat(made)[torch.tensor(order, device=device).argsort()]


@inference_mode()
def encode_pixels(
    model: nn.Module, pixels: Float[Tensor, "B 3 H W"] | Sequence[Float[Tensor, "3 _ _"]]
) -> Float[Tensor, "B D"]:
    """Vectors of a batch of one size, or of images of any size."""
    return image_features(model, pixels) if isinstance(pixels, Tensor) else encode_native(model, pixels)


def _grouped(order: list[int], lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Split `order` (by length) into groups whose padded size is within the budget."""
    rows: list[int] = []
    for row in order:
        if rows and (len(rows) + 1) * lengths[row] > budget:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def vision(model: nn.Module) -> ViT:
    """The image tower. Raises UsageError for a model of one image size."""
    if not isinstance(model, CLIP | ViT):
        raise UsageError(f"native sizes: expected a CLIP or ViT model, got {type(model).__name__}")
    tower = model.image if isinstance(model, CLIP) else model
    if isinstance(model, ViT) and tower.config.pool == "none":
        raise UsageError("native sizes: expected a model that pools its tokens (pool is 'none')")
    if tower.config.fixed:
        raise UsageError(f"native sizes: the model's positions fit {tower.config.image} pixels alone")
    return tower


def native_limit(model: nn.Module, native: int, record: Preprocessing) -> int:
    """The most patches of `native`. Raises UsageError."""
    check_native(native)
    return tokens_of(model, native or None, record)


def check_native(native: Any) -> None:
    """Raises UsageError for what cannot be a limit of patches."""
    if isinstance(native, bool) or not isinstance(native, int | np.integer) or native < 0:
        told = f"must be an integer of at least 0 (got {shown(native)}); 0 is as many patches as in training"
        raise UsageError(told, argument="native")


def tokens_of(model: nn.Module, max_tokens: int | None, record: Preprocessing) -> int:
    """The limit, by default as many patches as the preprocessing makes. Raises UsageError if out of range."""
    patch = vision(model).config.patch
    rows, columns = (side // patch for side in record.size)
    if max_tokens is not None and not 1 <= max_tokens <= MOST:
        raise UsageError(f"max_tokens must be in [1, {MOST}] (got {max_tokens})")
    return rows * columns if max_tokens is None else max_tokens
