"""Base of the convolutional image towers: images to a grid of vectors, and these to one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

MOST_BLOCKS = 1000


class ConvConfig:
    """Base of the towers' configurations. `patch`: pixels between places of the last map; `fixed`: no other image size
    fits."""

    patch, channels, prefix, fixed, pool = 32, 3, 0, False, "mean"
    image: tuple[int, int]
    layers: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch, self.image[1] // self.patch

    def __post_init__(self) -> None:
        if min(self.layers) < 1 or sum(self.layers) > MOST_BLOCKS:
            raise ValueError(f"layers {self.layers}: expected 1 to {MOST_BLOCKS} in all")
        if min(self.grid) < 1:
            raise ValueError(f"image {self.image}: smaller than {self.patch} pixels")


class ConvNorm(nn.Module):
    """A convolution without a bias, then batch normalization (Ioffe and Szegedy 2015). `padding` None: keeps the
    size."""

    def __init__(self, width: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1,
                 padding: int | None = None):  # fmt: skip
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(width, out, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B D _ _"]:
        return self.norm(self.conv(x))


class ChannelNorm(nn.LayerNorm):
    """A layer norm of each place's channels."""

    def forward(self, x: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvTower(nn.Module, ABC):
    """Base of the towers, with the methods of `ViT` that others use. `maps` gives the last map."""

    config: ConvConfig

    @property
    def embed(self) -> nn.Conv2d:
        """The first convolution."""
        return next(part for part in self.modules() if isinstance(part, nn.Conv2d))

    @abstractmethod
    def maps(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B D rows columns"]: ...

    def tokens(self, images: Float[Tensor, "B 3 height width"]) -> Float[Tensor, "B N D"]:
        """The last map, row by row. Raises ValueError for an image of another size where one alone fits."""
        size = tuple(images.shape[-2:])
        if self.config.fixed and size != tuple(self.config.image):
            raise ValueError(f"image size must be {self.config.image}, which the positions fit (got {size})")
        return self.maps(images).flatten(2).transpose(1, 2)

    def pooled(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B P"]:
        return tokens.mean(1)

    def features(
        self, images: Float[Tensor, "B 3 height width"] | Sequence[Float[Tensor, "3 _ _"]], keep: Tensor | None = None
    ) -> Float[Tensor, "B P"]:
        """Pooled vectors of a batch of images, or of images of several sizes, which go in groups of a size. Raises
        ValueError for `keep` (patches to keep), since a convolution needs all."""
        if keep is not None:
            raise ValueError("a convolutional image tower keeps all patches")
        if isinstance(images, Tensor):
            return self.pooled(self.tokens(images))
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, image in enumerate(images):
            groups.setdefault(tuple(image.shape), []).append(row)
        made = torch.cat([self.features(torch.stack([images[row] for row in rows])) for rows in groups.values()])
        order = torch.tensor([row for rows in groups.values() for row in rows], device=made.device)
        return made[order.argsort()]

    forward = features
