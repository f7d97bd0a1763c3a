"""Sparse feed-forwards: a mixture of experts, of which each token uses a few (Shazeer et al. 2017, Fedus et al. 2022,
Jiang et al. 2024), and one for each group of rows, such as languages (Fan et al. 2021, section 5.2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.layers import FeedForward

_logits: list[Tensor] | None = None
_even = False


@dataclass(frozen=True)
class ExpertsConfig:
    """`count` feed-forwards, of which a router chooses `top` for each token. `normalized`: their weights sum to 1; else
    they are the router's probabilities. `capacity`: most tokens of a row that an expert takes in one call; what is
    beyond, in the row's order, gets 0. `every`: distance of the blocks that have experts, from the second on;
    the others have one feed-forward."""

    count: int
    top: int
    normalized: bool = True
    capacity: int | None = None
    every: int = 1

    def __post_init__(self):
        for name in ("capacity", "every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} of experts: must be 1 or more (got {value})")
        if not 1 <= self.top <= self.count:
            raise ValueError(f"experts of a token: must be 1 to {self.count}, the number of experts (got {self.top})")


class Router(nn.Linear):
    """A map that computes in float32 whatever its type, as routing needs (Fedus et al. 2022, section 2.4)."""

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B X"]:
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            return F.linear(x.float(), self.weight.float())


class Experts(nn.Module):
    """Σ wₑ expertₑ(x) over the `top` experts of highest router probability w. An expert without tokens is not
    computed."""

    def __init__(self, config: ExpertsConfig, width: int, hidden: int, activation: str, gated: bool = False,
                 bias: bool = True, dropout: float = 0.0):  # fmt: skip
        super().__init__()
        self.config = config
        self.router = Router(width, config.count, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(width, hidden, activation, gated, bias, dropout) for _ in range(config.count)
        )

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens.float())
        if _logits is not None:
            _logits.append(logits)
        weights, chosen = logits.softmax(-1).topk(self.config.top)
        if self.config.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.config.capacity is not None:
            chosen = self._within(chosen, x.shape[-2], self.config.capacity)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = self._share(number, len(tokens)) if _even else (chosen == number).nonzero(as_tuple=True)
            if len(token):
                made = expert(tokens[token]) * weights[token, place, None]
                out = out.index_add(0, token, made.to(out.dtype))
        return out.view_as(x)

    def _within(self, chosen: Int[Tensor, "N K"], length: int, capacity: int) -> Int[Tensor, "N K"]:
        """The choices with no expert, `count`, for those beyond an expert's capacity in rows of `length` tokens."""
        used = F.one_hot(chosen, self.config.count).view(-1, length * self.config.top, self.config.count)
        order = (used.cumsum(1) * used).sum(-1).view_as(chosen)
        return torch.where(order <= capacity, chosen, self.config.count)

    def _share(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        """An equal share of the tokens."""
        each = -(-count * self.config.top // len(self.experts))
        return (torch.arange(each) + number * each) % count, torch.zeros(each, dtype=torch.long)


class GroupedFeed(nn.Module):
    """A feed-forward for each group; each row of the batch uses that of its group."""

    def __init__(self, groups: int, *feed: Any):
        super().__init__()
        self.feeds = nn.ModuleList(FeedForward(*feed) for _ in range(groups))

    def forward(self, x: Float[Tensor, "B T D"], group: Int[Tensor, "B"]) -> Float[Tensor, "B T D"]:
        """`group`: number of each row's feed-forward."""
        out = torch.zeros_like(x)
        for number, feed in enumerate(self.feeds):
            rows = (group == number).nonzero()[:, 0]
            if len(rows):
                made = feed(x[rows])
                out = out.to(made.dtype).index_copy(0, rows, made)
        return out


@contextmanager
def router_logits() -> Iterator[list[Float[Tensor, "N X"]]]:
    """Yield a list that receives the router's logits of each layer, tokens in the order of the rows."""
    global _logits
    before, _logits = _logits, []
    try:
        yield _logits
    finally:
        _logits = before


@contextmanager
def even_routing() -> Iterator[None]:
    """Give each expert an equal share of the tokens, whatever the router says: to count operations without data."""
    global _even
    _even = True
    try:
        yield
    finally:
        _even = False


def balance_loss(
    logits: Sequence[Float[Tensor, "N X"]], top: int, valid: Bool[Tensor, "N"] | None = None
) -> Float[Tensor, ""]:
    """Load-balancing loss X Σₑ fₑ Pₑ over all layers together (Fedus et al. 2022, equation 4; transformers' Mixtral):
    fₑ is the share of tokens that chose expert e, Pₑ its mean probability. It is lowest, `top`, for equal shares."""
    rows = torch.stack(list(logits)).float()  # L N X
    chances = rows.softmax(-1)
    used = torch.zeros_like(chances).scatter(-1, chances.topk(top).indices, 1.0)
    if valid is not None:
        chances, used = chances[:, valid], used[:, valid]
    return (used.mean((0, 1)) * chances.mean((0, 1))).sum() * rows.shape[-1]
