"""Positions: sinusoids, learned grids, relative terms, T5 buckets, ALiBi slopes and rotations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


def computed_on_cpu(shape: tuple[int, int], make: Callable[[], Tensor]) -> Tensor:
    """Compute a table on the CPU and move it to the default device. On the meta device, where a configuration may claim
    any `shape`, nothing is computed."""
    device = torch.get_default_device()
    if device.type == "meta":
        return torch.empty(shape)
    with torch.device("cpu"):
        return make().to(device)


def sinusoids(
    positions: Float[Tensor, "T"] | Int[Tensor, "T"], width: int, base: float = 10000.0, offset: int = 1
) -> Float[Tensor, "T D"]:
    """[sin | cos] halves with wavelengths from 2π to base·2π. The last exponent is (D/2-1)/(D/2-offset):
    offset 1 as in tensor2tensor, Whisper and M2M100; offset 0 as in Vaswani et al. 2017, section 3.5."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions.device)
    rates = torch.exp(steps * (-math.log(base) / (half - offset)))
    angles = positions.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def interpolate_grid(
    table: Float[Tensor, "N D"],
    old: tuple[int, int],
    new: tuple[int, int],
    offset: float | None = None,
    mode: str = "bicubic",
) -> Float[Tensor, "M D"]:
    """Resample a learned grid of positions, bicubic with antialiasing as timm's `resample_abs_pos_embed`. `offset`: as
    DINO instead (Caron et al. 2021, `interpolate_pos_encoding`), without antialiasing, by the ratios (new + offset) /
    old, where its 0.1 keeps rounding from losing a row; 0 as transformers, by the sizes. `mode`: or `bilinear`, or
    `bucket`: the old position that each new one's fraction of its side lies in (Idefics3)."""
    if mode == "bucket":
        rows, columns = (_buckets(*sides, table.device) for sides in zip(old, new, strict=True))
        return table[(rows[:, None] * old[1] + columns).flatten()]
    if old == new:
        return table
    # batch axis before the permutation: with other strides torch 2.11 resamples wrongly to a grid of one column
    grid = table.float().unflatten(0, old)[None].permute(0, 3, 1, 2)
    if not offset:
        grid = F.interpolate(grid, size=new, mode=mode, antialias=offset is None, align_corners=False)
    else:
        ratios = tuple((side + offset) / own for side, own in zip(new, old, strict=True))
        grid = F.interpolate(grid, scale_factor=ratios, mode=mode, align_corners=False)
    return grid[0].flatten(1).T.to(table.dtype)


def _buckets(old: int, new: int, device: torch.device) -> Int[Tensor, "n"]:
    """The old position of each new one. In float32, as in transformers, which for some sides is one too low."""
    edges = torch.arange(1 / old, 1.0, 1 / old, dtype=torch.float32, device=device)
    step = 1.0 / torch.tensor(new, dtype=torch.float32, device=device)
    places = torch.arange(new, dtype=torch.float32, device=device) * step
    return torch.bucketize(places.clamp(max=1 - 1e-6), edges, right=True)


def relative_distances(queries: int, keys: int, device: torch.device | None = None) -> Int[Tensor, "T S"]:
    """Key position minus query position, the last query aligned with the last key."""
    rows = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device)[None, :] - rows[:, None]


class BucketBias(nn.Module):
    """T5's learned bias per head and log-spaced distance bucket (Raffel et al. 2020, section 2.1)."""

    def __init__(self, heads: int, buckets: int = 32, furthest: int = 128, bidirectional: bool = True):
        super().__init__()
        if furthest <= buckets // (4 if bidirectional else 2):  # half of a side's buckets hold one distance each
            raise ValueError(f"furthest {furthest} is too small for {buckets} buckets")
        self.buckets, self.furthest, self.bidirectional = buckets, furthest, bidirectional
        self.table = nn.Embedding(buckets, heads)

    def bucket(self, distance: Int[Tensor, "T S"]) -> Int[Tensor, "T S"]:
        count, start = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            start = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        scaled = torch.log(distance.float().clamp(min=1) / exact) / math.log(self.furthest / exact)
        far = (exact + (scaled * (count - exact)).long()).clamp(max=count - 1)
        return start + torch.where(distance < exact, distance, far)

    def forward(self, distance: Int[Tensor, "T S"]) -> Float[Tensor, "H T S"]:
        """`distance` as from `relative_distances`."""
        return self.table(self.bucket(distance)).permute(2, 0, 1)


def alibi(heads: int, distance: Int[Tensor, "T S"]) -> Float[Tensor, "H T S"]:
    """Minus slope times distance, so 0 or less (Press et al. 2022); slopes are the paper's geometric series. `distance`
    as from `relative_distances`."""
    nearest = 2 ** math.floor(math.log2(heads))
    number = torch.arange(heads, device=distance.device)
    powers = torch.where(number < nearest, -8 * (number + 1), -4 * (2 * (number - nearest) + 1))
    return -torch.exp2(powers.float() / nearest)[:, None, None] * distance.abs()


class GatedBias(NamedTuple):
    """A bias for distances that each query scales by its own gate, and a mask that it does not scale."""

    bias: Float[Tensor, "H T S"]
    mask: Bool[Tensor, "..."]


class BiasGate(nn.Module):
    """Gate of a `GatedBias` for each head and query, from the query's part of the input (Chen et al. 2022, WavLM,
    section 3.1)."""

    def __init__(self, heads: int, head_width: int):
        super().__init__()
        self.head_width, self.scale = head_width, nn.Parameter(torch.ones(heads, 1))
        self.project = nn.Linear(head_width, 8)

    def forward(self, x: Float[Tensor, "B T D"], gated: GatedBias) -> Float[Tensor, "B H T S"]:
        """The bias as a float mask."""
        parts = self.project(x.unflatten(-1, (-1, self.head_width)).transpose(1, 2))  # B H T 8
        update, reset = parts.unflatten(-1, (2, 4)).sum(-1).sigmoid().unbind(-1)
        gate = update * (reset * self.scale - 1) + 2
        return (gate[..., None] * gated.bias).masked_fill(~gated.mask, -torch.inf)


class RelativeTerm(nn.Module):
    """Content and position biases u, v and the projected sinusoid term (Dai et al. 2019, section 3.3)."""

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.project = nn.Linear(width, heads * head_width, bias=False)
        self.content = nn.Parameter(torch.zeros(heads, head_width))
        self.position = nn.Parameter(torch.zeros(heads, head_width))

    def forward(
        self, query: Float[Tensor, "B H T E"], keys: int, scale: float, distance: None = None, offset: int = 0
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T S"]]:
        """The query with u added, and (q + v)·r(i - j) as a float mask. The last query is `offset` after the last
        key."""
        queries = query.shape[2]
        table = self.table(keys - 1 + offset, keys + queries)
        scores = ((query + self.position[:, None].to(query.dtype)) * scale) @ table.mT  # B H T R
        # row i needs distances (keys - queries + i) - j for j = 0..keys-1: the relative shift is a view of rows that
        # are a number shorter
        rows = scores.flatten(2)[..., queries - 1 : -1].unflatten(-1, (queries, keys + queries - 1))
        term = rows[..., :keys]
        # a GPU's attention needs aligned rows
        return query + self.content[:, None].to(query.dtype), term if query.is_cpu else term.contiguous()

    def table(self, furthest: int, count: int) -> Float[Tensor, "H R E"]:
        """The projected sinusoids of `count` distances from `furthest` down."""
        distances = torch.arange(furthest, furthest - count, -1, device=self.content.device)
        made = self.project(sinusoids(distances, self.width, offset=0).to(self.content.dtype))
        return made.unflatten(-1, (self.heads, -1)).transpose(0, 1)


class ShawTerm(nn.Module):
    """Dot products of queries with a learned vector per distance, clipped to ±`furthest` (Shaw et al. 2018, equation
    5). Their term on the values is omitted: it adds nothing in their table 3."""

    def __init__(self, head_width: int, furthest: int):
        super().__init__()
        self.furthest = furthest
        self.table = nn.Embedding(2 * furthest + 1, head_width)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(
        self, query: Float[Tensor, "B H T E"], keys: int, scale: float, distance: Int[Tensor, "T S"] | None = None
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T S"]]:
        """The query as it is, and q·a(j - i) as a float mask. `distance` is key minus query position; None: the last
        query is at the last key."""
        distance = relative_distances(query.shape[2], keys, query.device) if distance is None else distance
        distance = distance.clamp(-self.furthest, self.furthest)
        scores = query @ self.table.weight.to(query.dtype).T * scale  # B H T R
        return query, scores.gather(-1, (distance + self.furthest).expand(*scores.shape[:2], -1, -1))


class Disentangled:
    """DeBERTa's terms between contents and distances (He et al. 2021, equation 4): each query with the key of a
    distance, and each key with its query; both are maps of one `table` [2K D] by the attention's own projections.
    `furthest`: positions up to which the K log-spaced distances of each side reach (He et al. 2023)."""

    def __init__(self, table: Float[Tensor, "R D"], furthest: int):
        self.table, self.span, self.furthest = table, len(table) // 2, furthest

    def bucket(self, distance: Int[Tensor, "T S"]) -> Int[Tensor, "T S"]:
        """Row of the table for query minus key positions."""
        middle = self.span // 2
        size = torch.where(distance.abs() < middle, middle - 1, distance.abs())
        reach = torch.tensor((self.furthest - 1) / middle, dtype=torch.float32)
        far = torch.log(size.float() / middle) / torch.log(reach) * (middle - 1)
        rows = torch.where(size <= middle, distance, (torch.ceil(far) + middle) * distance.sign()).long()
        return (rows + self.span).clamp(0, 2 * self.span - 1)

    def term(
        self, query: Float[Tensor, "B H T E"], key: Float[Tensor, "B H S E"], queries: Float[Tensor, "1 H R E"],
        keys: Float[Tensor, "1 H R E"], scale: float,
    ) -> Float[Tensor, "B H T S"]:  # fmt: skip
        """A float mask. `queries`, `keys`: the projected table."""
        rows = self.bucket(-relative_distances(query.shape[2], key.shape[2], query.device))
        own = (query @ keys.mT).gather(-1, rows.expand(*query.shape[:2], -1, -1))
        other = (key @ queries.mT).gather(-1, rows.mT.expand(*key.shape[:2], -1, -1)).mT
        return (own + other) * scale


def rotary(
    positions: Int[Tensor, "*B T"],
    width: int,
    theta: float = 10000.0,
    scale: float = 1.0,
    interleaved: bool = False,
    turns: tuple[float, float, int] | None = None,
) -> "Rotation":
    """RoPE (Su et al. 2021) for queries and keys [B H T E] at these positions.

    `scale` < 1 interpolates positions (Chen et al. 2023). With `turns` (low, high, n) waves with more than `high` turns
    in n positions are not interpolated, those with `low` to `high` partly (Llama 3.1). `interleaved` pairs neighbours
    (Meta's files); otherwise halves are paired (Hugging Face's)."""
    rates = theta ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    if turns is not None:
        rates, scale = rates * interpolated(rates, scale, turns), 1.0
    return Rotation((positions.float() * scale)[..., None] * rates, interleaved)


def interpolated(rates: Float[Tensor, "R"], scale: float, turns: tuple[float, float, int]) -> Float[Tensor, "R"]:
    """Factors of the rates in Llama 3.1's scaling."""
    low, high, count = turns
    kept = ((count * rates / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return kept + (1 - kept) * scale


def stretched_theta(theta: float, width: int, factor: float, trained: int, length: Tensor) -> Tensor:
    """Base for texts of this length beyond the `trained` positions (dynamic NTK-aware interpolation)."""
    ratio = factor * length.clamp(min=trained).float() / trained - (factor - 1)
    return theta * ratio ** (width / (width - 2))


def yarn_rates(
    rates: Float[Tensor, "R"], theta: float, factor: float, fast: float, slow: float, trained: int, whole: bool
) -> Float[Tensor, "R"]:
    """RoPE's rates, divided by `factor` where a wave has less than `slow` turns in the `trained` positions, kept where
    it has more than `fast`, and between them in between (Peng et al. 2023, section 3.2). `whole`: round these limits to
    whole waves."""
    width = 2 * len(rates)
    low, high = (width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow))
    low, high = (math.floor(low), math.ceil(high)) if whole else (low, high)
    low, high = max(low, 0), min(high, width - 1)
    wave = torch.arange(len(rates), dtype=torch.float32, device=rates.device)
    stretched = ((wave - low) / ((high - low) or 0.001)).clamp(0, 1)
    return rates * (1 - stretched) + rates / factor * stretched


@dataclass(frozen=True)
class GridRotary:
    """Axial RoPE over a grid of patches: half of the angles follow the row, half the column.

    `centers`: the coordinates are centres of patches, from -1 to 1, in turns (DINOv3, Siméoni et al. 2025); otherwise
    numbers of patches plus `offset`, scaled from another grid to `reference` (EVA-02, Fang et al. 2023).
    `column_first`: the first half follows the column (Perception Encoder). `interleaved`: see `rotary`."""

    theta: float = 100.0
    centers: bool = False
    reference: tuple[int, int] | None = None
    offset: float = 0.0
    column_first: bool = False
    interleaved: bool = False

    def angles(self, grid: tuple[int, int], width: int) -> Float[Tensor, "N R"]:
        """Angles of each patch, row by row, for heads of this `width`."""
        rates = self.theta ** -(torch.arange(width // 4).float() / (width // 4))
        sides = [torch.arange(side).float() + self.offset for side in grid]
        if self.centers:
            sides = [2 * (2 * (axis + 0.5) / side - 1) * math.pi for axis, side in zip(sides, grid, strict=True)]
        elif self.reference is not None:
            sides = [axis / side * own for axis, side, own in zip(sides, grid, self.reference, strict=True)]
        row, column = torch.meshgrid(*sides, indexing="ij")
        axes = (column, row) if self.column_first else (row, column)
        return torch.cat([axis.flatten()[:, None] * rates for axis in axes], -1)


class GridTerm(nn.Module):
    """A learned bias per head and distance between patches, and three for the class token: to patches, from patches
    and to itself (BEiT, Bao et al. 2022)."""

    def __init__(self, heads: int, grid: tuple[int, int]):
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros((2 * grid[0] - 1) * (2 * grid[1] - 1) + 3, heads))

    def forward(
        self, query: Float[Tensor, "B H T E"], keys: int, scale: float, distance: None = None
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "H T S"]]:
        """The query as it is, and the bias. Raises ValueError for tokens of another grid."""
        count = self.grid[0] * self.grid[1] + 1
        if not query.shape[2] == keys == count:
            raise ValueError(f"relative positions of {count} tokens: got {query.shape[2]} to {keys}")
        index = _grid_distances(*self.grid, query.device)
        return query, self.table[index].permute(2, 0, 1).to(query.dtype)


def _grid_distances(rows: int, columns: int, device: torch.device) -> Int[Tensor, "T T"]:
    """Row of `GridTerm`'s table for each pair of tokens. Not kept: a tensor of inference or of a fake mode is of no use
    in training."""
    sides = (torch.arange(side, device=device) for side in (rows, columns))
    row, column = (axis.flatten() for axis in torch.meshgrid(*sides, indexing="ij"))
    down = row[:, None] - row + rows - 1
    found = down * (2 * columns - 1) + column[:, None] - column + columns - 1
    last = (2 * rows - 1) * (2 * columns - 1)
    found = F.pad(found, (1, 0, 1, 0), value=last)
    found[1:, 0], found[0, 0] = last + 1, last + 2
    return found


class Rotation:
    """Turns pairs (a, b) of queries and keys into (a·cos - b·sin, b·cos + a·sin), in few calls: single tokens wait for
    their number. `cos`, `sin`: [T E] or [B 1 T E]. Where they are narrower than a head, its other numbers stay. `gain`:
    factor of both."""

    def __init__(self, angles: Float[Tensor, "*B T R"], interleaved: bool, gain: float = 1.0):
        cos, sin = (part if gain == 1 else part * gain for part in (angles.cos(), angles.sin()))
        at, self.half, self.interleaved = -1 if interleaved else -2, angles.shape[-1], interleaved
        cos, sin = torch.stack([cos, cos], at).flatten(-2), torch.stack([-sin, sin], at).flatten(-2)
        # positions may differ between rows of the batch
        self.cos, self.sin = (cos[:, None], sin[:, None]) if angles.ndim == 3 else (cos, sin)

    def __call__(self, x: Float[Tensor, "B H T E"]) -> Float[Tensor, "B H T E"]:
        if self.cos.shape[-1] < x.shape[-1]:
            turned, rest = x.split((self.cos.shape[-1], x.shape[-1] - self.cos.shape[-1]), -1)
            return torch.cat([self(turned), rest], -1)
        wide = x if x.dtype == torch.float64 else x.float()
        swapped = wide.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else wide.roll(self.half, -1)
        return (wide * self.cos + swapped * self.sin).to(x.dtype)
