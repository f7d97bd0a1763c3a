"""Connectors: states of an image or audio encoder to rows of a text decoder."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from multimodal.blocks.layers import ACTIVATIONS
from multimodal.blocks.stack import Stack, StackConfig


@dataclass(frozen=True)
class ConnectorConfig:
    """`source`, `width`: of the encoder's states and of the decoder. In this order:

    - `pool`: mean of that many consecutive states, without an incomplete last group; `norm`: LayerNorm (Qwen2-Audio).
    - `shuffle`: a square of that many patches a side becomes one row (pixel shuffle, Shi et al. 2016; Idefics3).
    - `stack`: that many consecutive states become one row, the last filled with zeros (Voxtral).
    - `resampler`: blocks in which `queries` learned vectors attend to the states (Jaegle et al. 2021; Flamingo).
    - A linear map, or with `hidden` a two-layer perceptron (LLaVA 1.5, Liu et al. 2023).
    - `positions`: so many learned vectors, one added to each row: a decoder with relative positions else hardly sees
      where in an image a row lies."""

    source: int
    width: int
    pool: int = 1
    norm: bool = False
    norm_eps: float = 1e-5
    shuffle: int = 1
    stack: int = 1
    resampler: StackConfig | None = None
    queries: int = 0
    hidden: int = 0
    activation: str = "gelu"
    bias: bool = True
    positions: int = 0

    def __post_init__(self) -> None:
        for name in ("source", "width", "pool", "shuffle", "stack"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1 (got {value})")
        if bool(self.queries) != (self.resampler is not None):
            raise ValueError(f"queries {self.queries}: expected with a resampler, and only then")

    @property
    def inner(self) -> int:
        """Width of what the map takes."""
        if self.resampler is not None:
            return self.resampler.block.attention.width
        return self.source * self.shuffle**2 * self.stack

    def count(self, states: int, grid: tuple[int, int] | None = None) -> int:
        """Number of rows from so many states, or from a grid of patches."""
        if self.queries:
            return self.queries
        if self.shuffle > 1:
            return (grid[0] // self.shuffle) * (grid[1] // self.shuffle)
        return -(-(states // self.pool) // self.stack)


class Connector(nn.Module):
    """Pooling or merging of neighbours, an optional resampler, and a linear map or perceptron."""

    def __init__(self, config: ConnectorConfig):
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.source, eps=config.norm_eps) if config.norm else None
        self.queries = (
            nn.Parameter(torch.empty(config.queries, config.inner).normal_(std=0.02)) if config.queries else None
        )
        self.resampler = Stack(config.resampler) if config.resampler is not None else None
        self.up = nn.Linear(config.inner, config.hidden, bias=config.bias) if config.hidden else None
        self.out = nn.Linear(config.hidden or config.inner, config.width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.positions = (
            nn.Parameter(torch.empty(config.positions, config.width).normal_(std=0.02)) if config.positions else None
        )

    def forward(self, x: Float[Tensor, "B N S"], grid: tuple[int, int] | None = None) -> Float[Tensor, "B M D"]:
        """`grid`: rows and columns of the patches, for `shuffle`. Raises ValueError for a grid that does not divide and
        for more rows than `positions`."""
        config = self.config
        if config.pool > 1:
            rows = x.shape[1] // config.pool  # may be 0
            x = x[:, : rows * config.pool].unflatten(1, (rows, config.pool)).mean(2)
        x = x if self.norm is None else self.norm(x)
        x = pixel_shuffle(x, grid, config.shuffle) if config.shuffle > 1 else x
        if config.stack > 1:
            x = F.pad(x, (0, 0, 0, -x.shape[1] % config.stack)).unflatten(1, (-1, config.stack)).flatten(2)
        if self.resampler is not None:
            x = self.resampler(self.queries.expand(x.shape[0], -1, -1), x)
        x = self.out(x if self.up is None else self.activation(self.up(x)))
        if self.positions is None:
            return x
        if x.shape[1] > config.positions:
            raise ValueError(f"{x.shape[1]} rows are more than the {config.positions} positions")
        return x + self.positions[: x.shape[1]]


def pixel_shuffle(x: Float[Tensor, "B N S"], grid: tuple[int, int], side: int) -> Float[Tensor, "B M E"]:
    """Merge squares of `side` patches into one row each, E = side²·S, ordered as (row, column, channel)."""
    rows, columns = grid
    if rows * columns != x.shape[1] or rows % side or columns % side:
        raise ValueError(f"{x.shape[1]} patches in a grid of {rows} x {columns} cannot merge by {side}")
    squares = x.unflatten(1, (rows // side, side, columns // side, side))
    return squares.transpose(2, 3).flatten(3).flatten(1, 2)
