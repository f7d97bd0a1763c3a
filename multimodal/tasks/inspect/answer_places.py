"""Attention to the rows of a medium, as attention to patches of its images and moments of its sound."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from multimodal.blocks.capture import capture_attention
from multimodal.blocks.connector import Connector, pixel_shuffle
from multimodal.inference.modules import inference_mode
from multimodal.models.any_to_text import AnyToText
from multimodal.models.conformer import ConformerEncoder
from multimodal.tasks.ask.media import Medium
from multimodal.tasks.inspect.maps import Axis, stacked
from multimodal.tokens.audio.log_mel import HOP, RATE
from multimodal.tokens.image.preprocessing import Preprocessing, squared
from multimodal.tokens.image.tiles import kept_patches
from multimodal.tokens.video.names import FrameName

Grid = tuple[int, int]  # rows, columns


class Seen(NamedTuple):
    """One medium and the attention to it. `weights` [T S] sum to the `share` of each token that the medium gets; S are
    the patches of `keys.grid`, moments of sound from `start` s on, or tokens of the text. A map of patches lies over
    `image` by its `record`. Marks between patches, such as newlines, count in the share alone."""

    name: str
    share: Float[Tensor, "T"]
    weights: Float[Tensor, "T S"]
    keys: Axis
    start: float = 0.0
    image: Image.Image | None = None
    record: Preprocessing | None = None
    patch: int = 1

    @property
    def maps(self) -> Float[Tensor, "T S"]:
        """Weights that sum to 1 for each token."""
        return self.weights / self.weights.sum(-1, keepdim=True).clamp(min=1e-30)


def places(
    record: Preprocessing | None, model: AnyToText, name: str, time: float | None, medium: Medium,
    weights: Float[Tensor, "T R"],
) -> list[Seen]:  # fmt: skip
    """The medium, or each frame of a video, with the attention to its rows. `time`: see `MessagePart`."""
    if medium.kind == "audio":
        return [_sound(model, name, time or 0.0, medium, weights)]
    if medium.kind == "image":
        label = name if time is None else FrameName(name, time)
        return [Seen(label, weights.sum(-1), *_image(record, model, medium, weights))]
    each = weights[:, : weights.shape[1] - (model.newline is not None)].unflatten(1, (len(medium.shown), -1))
    grid, found = patch_grid(model, medium.tensors), []
    for number, (image, moment) in enumerate(zip(medium.shown, medium.times, strict=True)):
        part = each[:, number]
        own = part if model.newline is not None else part @ tile_shares(model, medium.tensors[number : number + 1])
        halved = (-(-grid[0] // 2), -(-grid[1] // 2)) if model.newline is not None else grid
        drawn = _single(record.replace(tiling=None), model, image, halved)  # frames have no tiles
        found.append(Seen(FrameName(name, moment), part.sum(-1), own, *drawn))
    return found


def patch_grid(model: AnyToText, pixels: Float[Tensor, "N 3 H W"]) -> Grid:
    patch = model.config.image.patch
    return pixels.shape[-2] // patch, pixels.shape[-1] // patch


def connector_shares(
    connector: Connector, states: Float[Tensor, "N S"], grid: Grid | None = None
) -> Float[Tensor, "M N"]:  # fmt: skip
    """Share of each state in each row of a connector; a row sums to 1. A resampler's shares are its mean
    attention."""
    config, shares = connector.config, torch.eye(len(states))
    if config.pool > 1:
        rows = len(shares) // config.pool  # may be 0
        shares = shares[: rows * config.pool].unflatten(0, (rows, config.pool)).mean(1)
    if config.shuffle > 1:
        shares = pixel_shuffle(shares[None], grid, config.shuffle)[0].unflatten(1, (config.shuffle**2, -1)).mean(1)
    if config.stack > 1:
        shares = F.pad(shares, (0, 0, 0, -len(shares) % config.stack)).unflatten(0, (-1, config.stack)).sum(1)
        shares = shares / shares.sum(1, keepdim=True)
    if connector.resampler is None:
        return shares
    with inference_mode(), capture_attention() as found:
        connector(states[None], grid)
    return stacked({id(block.cross) for block in connector.resampler.blocks}, found).mean((0, 1)) @ shares


def tile_shares(model: AnyToText, pixels: Float[Tensor, "1 3 H W"]) -> Float[Tensor, "M N"]:
    """Share of each patch in each row of an image or tile. What a row takes of the class token is left out."""
    grid, config = patch_grid(model, pixels), model.config
    prefix = config.image.prefix if config.image_prefix else 0
    if config.image_connector.queries:
        with inference_mode():
            states = model.image_states(pixels.to(model.decoder.device))[0][0]
    else:
        states = torch.empty(prefix + grid[0] * grid[1], 0)
    return connector_shares(model.image_connector, states, grid)[:, prefix:]


def _sound(model: AnyToText, name: str, start: float, medium: Medium, weights: Float[Tensor, "T R"]) -> Seen:
    device = model.decoder.device
    with inference_mode():
        padded, counts = model.audio_states(medium.tensors.to(device), medium.lengths.to(device))
    step = HOP / RATE * (model.config.audio.subsample if isinstance(model.audio, ConformerEncoder) else 2)
    states = (own[:count] for own, count in zip(padded, counts.tolist(), strict=True))
    shares = [connector_shares(model.audio_connector, one) for one in states]
    parts = weights.split([len(one) for one in shares], 1)
    over = torch.cat([part @ one for part, one in zip(parts, shares, strict=True)], 1)
    return Seen(name, weights.sum(-1), over, Axis("second", step=step), start)


Placed = tuple[Float[Tensor, "T S"], Axis, float, Image.Image, Preprocessing, int]  # fields of `Seen`


def _image(record: Preprocessing, model: AnyToText, medium: Medium, weights: Float[Tensor, "T R"]) -> Placed:
    """The map of an image: that of its overview, or the sum of its overview's and its tiles' on a common grid."""
    (down, across), grid, (image,) = medium.tile.grid, patch_grid(model, medium.tensors), medium.shown
    if model.newline is not None and medium.tile.grid != (0, 0):
        kept = kept_patches(medium.tile.size, medium.tile.grid, grid[0], record.tiling.most)[1]
        overview, lines = weights[:, : grid[0] * grid[1]], weights[:, grid[0] * grid[1] :]
        tiles = lines.unflatten(1, (kept[0], kept[1] + 1))[:, :, :-1]
        return ((tiles + _spread(overview, grid, kept)).flatten(1), *_stretched(record, image, kept))
    each = weights[:, : weights.shape[1] - (model.newline is not None)].unflatten(1, (len(medium.tensors), -1))
    maps = [each[:, i] @ tile_shares(model, tile) for i, tile in enumerate(medium.tensors.split(1))]
    if len(maps) == 1:
        return (maps[0], *_single(record, model, image, grid, medium.tile.grid == (0, 0)))
    overview = maps.pop(0 if record.tiling.division == "fit" else -1)
    tiles = torch.stack(maps, 1).unflatten(1, (down, across)).unflatten(3, grid).permute(0, 1, 3, 2, 4)
    common = (down * grid[0], across * grid[1])
    both = tiles.flatten(3).flatten(1, 2) + _spread(overview, grid, common)
    return (both.flatten(1), *_stretched(record, image, common))


def _spread(overview: Float[Tensor, "T N"], grid: Grid, finer: Grid) -> Float[Tensor, "T rows columns"]:
    """A map on another grid of the same image, with its sum."""
    over = F.interpolate(overview.unflatten(1, grid)[:, None], finer, mode="bilinear")[:, 0]
    return over * (overview.sum(1) / over.sum((1, 2)).clamp(min=1e-30))[:, None, None]


def _single(
    record: Preprocessing, model: AnyToText, image: Image.Image, grid: Grid, plain: bool = True
) -> tuple[Axis, float, Image.Image, Preprocessing, int]:  # fmt: skip
    """Axis and drawing of an image that the model sees whole; not `plain`: as the only tile."""
    if record.tiling is not None and (record.tiling.division != "fit" or not plain):
        return _stretched(record, image, grid)
    shown = image if record.tiling is None else squared(image.convert("RGB"), record.mean)
    patch = record.size[0] // grid[0]
    return Axis("patch", (), patch, grid), 0.0, shown, record, patch


def _stretched(
    record: Preprocessing, image: Image.Image, grid: Grid
) -> tuple[Axis, float, Image.Image, Preprocessing, int]:  # fmt: skip
    """Axis and drawing of a grid over the whole image."""
    return Axis("patch", (), 1.0, grid), 0.0, image, record.replace(size=grid, resize="squash", tiling=None), 1
