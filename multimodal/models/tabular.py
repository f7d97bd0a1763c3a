"""FT-Transformer (Gorishniy et al. 2021): each column of a table becomes a token."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.positions import computed_on_cpu
from multimodal.blocks.stack import BlockConfig, Stack, StackConfig


@dataclass(frozen=True)
class TabularConfig:
    """`numbers`: count of numeric columns, each with `quantiles` points of its distribution. `categories`: number of
    categories of each other column; the first stands for unknown or missing. `outputs`: classes, or 1 for a number."""

    numbers: int
    categories: tuple[int, ...]
    quantiles: int
    outputs: int
    stack: StackConfig

    @property
    def width(self) -> int:
        return self.stack.block.attention.width


def ft_stack(width: int, layers: int, heads: int, attention_dropout: float = 0.2, dropout: float = 0.1) -> StackConfig:
    """The paper's blocks (appendix E): pre-norm, ReGLU of 4/3 the width, dropout in attention and feed-forward."""
    attention = AttentionConfig(width, heads, dropout=attention_dropout)
    return StackConfig(BlockConfig(attention, 4 * width // 3, "relu", gated=True, dropout=dropout), layers)


class FTTransformer(nn.Module):
    """A number's token is value · vector + bias, a category's embedding + bias; a class token comes first, and the
    first block has no norm before its attention (section 3.3).

    Inputs are raw: `quantiles` of the training data map each numeric column to a normal distribution; missing values
    (NaN) get the median and a vector of their own. Outputs are multiplied by `scale` and shifted by `shift` to the
    target's unit (1 and 0 for classes), in float64: a target may be large against its deviation."""

    def __init__(self, config: TabularConfig):
        super().__init__()
        self.config = config
        width, columns = config.width, config.numbers + len(config.categories)
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(config.numbers, width).uniform_(-bound, bound))
        self.missing = nn.Parameter(torch.zeros(config.numbers, width))
        self.bias = nn.Parameter(torch.empty(columns, width).uniform_(-bound, bound))
        self.table = nn.Embedding(sum(config.categories), width)
        nn.init.uniform_(self.table.weight, -bound, bound)
        self.class_token = nn.Parameter(torch.empty(width).uniform_(-bound, bound))
        self.firsts = list(accumulate(config.categories, initial=0))[:-1]  # rows of the table
        shape = config.numbers, config.quantiles
        quantiles = computed_on_cpu(shape, lambda: torch.linspace(-1, 1, config.quantiles).repeat(config.numbers, 1))
        self.register_buffer("quantiles", quantiles)
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.stack = Stack(replace(config.stack, first_norm=False))
        self.head = nn.Linear(width, config.outputs)

    def forward(self, numbers: Float[Tensor, "B N"], categories: Int[Tensor, "B C"]) -> Float[Tensor, "B O"]:
        """Logits, or numbers in the target's unit. Raises ValueError for a category outside its column's range."""
        sizes, firsts = torch.tensor([self.config.categories, self.firsts], device=categories.device)
        if bool(((categories < 0) | (categories >= sizes)).any()):
            raise ValueError(f"categories must be at least 0 and below {list(self.config.categories)}")
        unknown = numbers.isnan()
        values = torch.where(unknown, 0, normal_scores(numbers.nan_to_num(), self.quantiles)).to(self.weight.dtype)
        tokens = values[..., None] * self.weight + unknown[..., None] * self.missing
        tokens = torch.cat([tokens, self.table(categories + firsts.long())], 1) + self.bias
        tokens = torch.cat([self.class_token.expand(tokens.shape[0], 1, -1), tokens], 1)
        first = torch.zeros(tokens.shape[0], dtype=torch.long, device=tokens.device)
        state = self.stack(tokens, only=first)[:, 0]
        return self.head(torch.relu(state)).double() * self.scale + self.shift


def normal_scores(values: Float[Tensor, "B N"], quantiles: Float[Tensor, "N Q"]) -> Float[Tensor, "B N"]:
    """Map values from the distribution with these evenly spaced `quantiles` to a normal one (scikit-learn's
    QuantileTransformer). A value that several quantiles repeat maps to their middle."""
    x, knots = values.double().T.contiguous(), quantiles.double()
    count = knots.shape[1]
    share = (_below(x, knots) + (count - 1 - _below(-x, -knots.flip(-1)))) / (2 * (count - 1))
    return torch.special.ndtri(share.clamp(1e-7, 1 - 1e-7)).T


def _below(x: Float[Tensor, "N B"], knots: Float[Tensor, "N Q"]) -> Float[Tensor, "N B"]:
    """Fractional index of each value among the knots, after the last of equal ones."""
    right = torch.searchsorted(knots, x, right=True).clamp(1, knots.shape[1] - 1)
    low, high = knots.gather(1, right - 1), knots.gather(1, right)
    within = torch.where(
        high > low, (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny), (x >= low).to(x.dtype)
    )
    return right - 1 + within.clamp(0, 1)
