"""Pixels as tokens (Chen et al. 2020, "Generative pretraining from pixels"): small images in the colours of a palette,
row by row."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from multimodal.data.datasets.images import square
from multimodal.data.datasets.text import TokenBatch
from multimodal.data.loader import BROKEN, broken_item
from multimodal.data.sources import Source
from multimodal.errors import DataError, demand
from multimodal.models.text import TextTransformer
from multimodal.tokens.image.reading import read_image
from multimodal.train.objectives.text.language import guesses_loss

log = logging.getLogger(__name__)

SAMPLE = 50_000  # pixels from which a palette is computed
ROUNDS = 50  # of k-means, at most


@dataclass(frozen=True)
class ImagesInMemory:
    """Images of one size. `labels`: class numbers, -1 for none."""

    pixels: UInt8[Tensor, "N S S 3"]
    labels: Int[Tensor, "N"]
    names: tuple[str, ...]  # of the classes

    @classmethod
    def read(cls, source: Source, side: int) -> "ImagesInMemory":
        """Read the central square of each image at `side` pixels, skipping broken ones with a warning. Raises DataError
        if all are broken."""
        names, images, labels = source.labels or (), [], []
        for key in range(len(source)):
            try:
                sample = source.read(key)
                images.append(square(read_image(sample.media), side).permute(1, 2, 0))
                labels.append(names.index(sample.label) if sample.label in names else -1)
            except BROKEN as error:
                log.warning("broken item skipped: %s", broken_item(source.name(key), error))
        if not images:
            raise DataError(f"{source.name(0)}: broken, as are all {len(source)} images")
        return cls(torch.stack(images), torch.tensor(labels), names)

    def __len__(self) -> int:
        return len(self.pixels)

    def part(self, chosen: Tensor) -> "ImagesInMemory":
        return ImagesInMemory(self.pixels[chosen], self.labels[chosen], self.names)


class Palette:
    """Colours; each pixel takes the nearest, by squared distance of RGB values as in the paper."""

    def __init__(self, colours: Float[Tensor, "C 3"]):
        self.colours = colours

    @classmethod
    def of(cls, pixels: UInt8[Tensor, "N S S 3"], count: int, seed: int = 0) -> "Palette":
        """Cluster a random sample of the pixels by k-means; it may have fewer colours. Raises UsageError for less than
        two colours."""
        demand("colours", count, count >= 2, "2 or more")
        from sklearn.cluster import KMeans

        random = torch.Generator().manual_seed(seed)
        flat = pixels.reshape(-1, 3)
        sample = flat[torch.randint(len(flat), (min(SAMPLE, len(flat)),), generator=random)]
        distinct = sample.unique(dim=0)
        if len(distinct) <= count:
            return cls(distinct.float())
        means = KMeans(count, n_init=1, max_iter=ROUNDS, random_state=seed).fit(sample.float().numpy())
        return cls(torch.from_numpy(np.ascontiguousarray(means.cluster_centers_)).float())

    def __len__(self) -> int:
        return len(self.colours)

    def ids(self, pixels: UInt8[Tensor, "N S S 3"], chunk: int = 65536) -> Int[Tensor, "N T"]:
        """Return the nearest colour of each pixel, row by row."""
        parts = [torch.cdist(part.float(), self.colours).argmin(1) for part in pixels.reshape(-1, 3).split(chunk)]
        return torch.cat(parts).view(len(pixels), -1)

    def pixels(self, ids: Int[Tensor, "N T"]) -> UInt8[Tensor, "N S S 3"]:
        side = math.isqrt(ids.shape[1])
        return self.colours[ids].round().clamp(0, 255).to(torch.uint8).view(len(ids), side, side, 3)


class PixelRows:
    """Training source of images as ids after `begin`, for `PrepareTokens`."""

    def __init__(self, ids: Int[Tensor, "N T"], begin: int):
        self.ids, self.begin = ids.to(torch.int32), begin

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, key: int) -> str:
        return f"image {key}"

    def read(self, key: int) -> list[Int[Tensor, "_"]]:
        return [after(self.ids[key : key + 1].long(), self.begin)[0]]


class FlippedImages:
    """Prepares a row of an image, mirrored with probability one half."""

    def __init__(self, prepare):
        self.prepare = prepare

    def __call__(self, pieces: Sequence[Int[Tensor, "_"]], random: torch.Generator) -> TokenBatch:
        if bool(torch.rand((), generator=random) < 0.5):
            side = math.isqrt(len(pieces[0]) - 1)
            pieces = [torch.cat([piece[:1], piece[1:].view(side, side).flip(1).flatten()]) for piece in pieces]
        return self.prepare(list(pieces), random)


def after(ids: Int[Tensor, "N T"], begin: int) -> Int[Tensor, "N _"]:
    """Prepend the token that begins an image."""
    return torch.cat([ids.new_full((len(ids), 1), begin), ids], 1)


@torch.inference_mode()
def bits(model: TextTransformer, ids: Int[Tensor, "N T"], begin: int, batch: int = 32) -> float:
    """Return the mean bits per colour."""
    total, device = 0.0, model.device
    for part in ids.split(batch):
        rows = after(part, begin).to(device)
        total += guesses_loss(model, TokenBatch(rows[:, :-1], rows[:, 1:])).item()
    return total / math.log(2) / ids.numel()


def marginal_bits(train: Int[Tensor, "N T"], held: Int[Tensor, "M T"], colours: int) -> float:
    """Return the bits per colour of a unigram model with add-one smoothing."""
    counts = torch.bincount(train.flatten().long(), minlength=colours).double() + 1
    return float(-(counts / counts.sum()).log2()[held.long()].mean())


@torch.inference_mode()
def middle_features(
    model: TextTransformer, ids: Int[Tensor, "N T"], begin: int, layer: int, batch: int = 32
) -> Float[Tensor, "N D"]:
    """Return the mean over pixels of the input of layer `layer` (section 2.4 of the paper)."""
    features = []
    for part in ids.split(batch):
        states: list[Tensor] = []
        model.states(after(part, begin)[:, :-1].to(model.device), states=states)
        features.append(states[layer].float().mean(1).cpu())
    return torch.cat(features)
