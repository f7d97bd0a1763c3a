"""Pictures at their own aspect: as many whole patches as a budget of tokens holds, several sizes in one batch.

As NaFlex (SigLIP 2, arXiv:2502.14786, section 2.4) and NaViT (Dehghani et al. 2023) prepare them, for any model with
learned positions, which are resampled to each picture's grid (bicubic, antialiased, as timm's `NaFlexVit`)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from multimodal.errors import ImageError, UsageError
from multimodal.models.clip import CLIP
from multimodal.models.vit import ViT
from multimodal.tasks.encode.attempts import OF_ALL, item_error
from multimodal.tasks.encode.images import ahead, name_of
from multimodal.tokens.image.preprocessing import Preprocessing, native_size, preprocess, read_image, to_rgb

MOST = 1 << 14  # patches of a picture: attention takes their square
TOKENS = 2048  # a batch, padding included: more is no faster on a CPU


class NativePictures(NamedTuple):
    """A batch as `pictures.batches` gives it, each picture with pixels of its own size."""

    read: list[Any]
    pixels: tuple[Float[Tensor, "3 _ _"], ...]
    refused: list[tuple[Any, ImageError]]


class Encoded(NamedTuple):
    """`padding`: the share of the tokens computed that held no picture."""

    features: Float[Tensor, "B D"]
    padding: float


def native_features(
    model: nn.Module, images: Iterable[Any], record: Preprocessing, max_tokens: int | None = None,
    token_budget: int = TOKENS, workers: int | None = None,
) -> Float[Tensor, "N D"]:  # fmt: skip
    """What a CLIP embeds (unit vectors) or a ViT pools of each picture, resized at its own aspect to at most
    `max_tokens` patches (default: as many as the model learned).

    A picture's vector is that of the picture alone, and for a picture of the learned shape the one of the usual
    preprocessing. Raises ImageError for the first picture that cannot be read or does not fit, UsageError."""
    made = []
    for batch in native_batches(model, images, record, max_tokens, workers=workers):
        for _, error in batch.refused:
            raise error
        made.append(encode_native(model, batch.pixels, token_budget).features.float().cpu())
    return torch.cat(made) if made else torch.zeros(0, _width(model))


def native_batches(
    model: nn.Module, images: Iterable[Any], record: Preprocessing, max_tokens: int | None = None,
    batch_size: int = 128, workers: int | None = None,
) -> Iterator[NativePictures]:  # fmt: skip
    """`batch_size` pictures at a time, in their order, decoded ahead by threads. Raises UsageError for a model that
    takes pictures of one size alone, or a limit below 1."""
    most, patch = tokens_of(model, max_tokens), vision(model).config.patch
    for items in ahead(images, lambda image: native_pixels(image, record, patch, most), batch_size, workers):
        read, pixels, refused = [], [], []
        for image, future in items:
            try:
                pixels.append(future.result())
                read.append(image)
            except OF_ALL:
                raise
            except Exception as error:
                refused.append((image, item_error(error, name_of(image), ImageError)))
        yield NativePictures(read, tuple(pixels), refused)


def native_pixels(image: Any, record: Preprocessing, patch: int, max_tokens: int) -> Float[Tensor, "3 H W"]:
    """One picture at the largest size of its own aspect with at most `max_tokens` patches of `patch` pixels.

    Raises ImageError for one that cannot be read, or as `native_record`."""
    picture = to_rgb(image) if isinstance(image, Image.Image) else read_image(image)
    return preprocess(picture, native_record(picture, record, patch, max_tokens, name_of(image)))


def native_record(
    picture: Image.Image, record: Preprocessing, patch: int, max_tokens: int, name: str = "picture"
) -> Preprocessing:
    """How a picture, turned upright, becomes those pixels: whole, and at its own aspect but for the rounding to
    patches. Raises ImageError for one that is smaller than a patch, or longer than a row of `max_tokens` patches."""
    width, height = picture.size
    if min(width, height) < patch:
        raise ImageError(f"{name}: {width}x{height} pixels are less than one patch ({patch}x{patch})")
    if max(width, height) > max_tokens * min(width, height):
        raise ImageError(
            f"{name}: {width}x{height} pixels are longer than one row of {max_tokens} patches at its aspect"
        )
    return record.replace(size=native_size(picture, patch, max_tokens), resize="squash", crop=1.0)


@torch.inference_mode()
def encode_native(model: nn.Module, pixels: Sequence[Float[Tensor, "3 _ _"]], token_budget: int = TOKENS) -> Encoded:
    """Vectors of pictures of any sizes, in their order. They are taken by size, as many at a time as together, padded
    to the longest, make at most `token_budget` tokens (one at least)."""
    config, device = vision(model).config, next(model.parameters()).device
    lengths = [config.prefix + (p.shape[1] // config.patch) * (p.shape[2] // config.patch) for p in pixels]
    order = sorted(range(len(pixels)), key=lambda i: (lengths[i], pixels[i].shape[1]))
    made, computed = [], 0
    for rows in _grouped(order, lengths, token_budget):
        images = tuple(pixels[row].to(device) for row in rows)
        made.append(model.encode_image(images) if isinstance(model, CLIP) else model.features(images))
        computed += len(rows) * lengths[rows[-1]]
    if not made:
        return Encoded(torch.zeros(0, _width(model)), 0.0)
    back = torch.tensor(order, device=device).argsort()
    return Encoded(torch.cat(made)[back], 1 - sum(lengths) / computed)


def _grouped(order: list[int], lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Parts of `order`, which is by length: rows times the last one's length within the budget."""
    rows: list[int] = []
    for row in order:
        if rows and (len(rows) + 1) * lengths[row] > budget:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def vision(model: nn.Module) -> ViT:
    """The part that sees. Raises UsageError for a model that cannot take pictures of several sizes."""
    if not isinstance(model, CLIP | ViT):
        raise UsageError(f"{type(model).__name__}: native sizes need a clip or a vit")
    tower = model.image if isinstance(model, CLIP) else model
    if isinstance(model, ViT) and tower.config.pool == "none":
        raise UsageError("native sizes need a model that pools its tokens (this one has pool 'none')")
    return tower


def tokens_of(model: nn.Module, max_tokens: int | None) -> int:
    """The limit, by default as many patches as the model learned. Raises UsageError for one below 1."""
    rows, columns = vision(model).config.grid
    if max_tokens is not None and not 1 <= max_tokens <= MOST:
        raise UsageError(f"native sizes: max_tokens {max_tokens} is not from 1 to {MOST}")
    return rows * columns if max_tokens is None else max_tokens


def _width(model: nn.Module) -> int:
    return model.config.embed if isinstance(model, CLIP) else model.config.width
