"""Scaling laws of language models: compute budgets, compute-optimal sizes, fitted power laws."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multimodal.errors import UsageError

FLOPS_A_PARAMETER = 6  # for each token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)
OPTIMAL_TOKENS = 20  # for each parameter (Hoffmann et al. 2022, table 3: 20.0 to 21.2)
PETAFLOP_DAY = 1e15 * 86_400


class Budget(NamedTuple):
    """Compute of training `parameters` on `tokens`."""

    parameters: float
    tokens: float

    @property
    def flops(self) -> float:
        """C = 6 N D, without attention's products of queries and keys."""
        return FLOPS_A_PARAMETER * self.parameters * self.tokens


def compute_optimal(flops: float) -> Budget:
    """Parameters and tokens with the lowest loss for a budget, by Hoffmann et al.'s 20 tokens per parameter."""
    parameters = math.sqrt(flops / (FLOPS_A_PARAMETER * OPTIMAL_TOKENS))
    return Budget(parameters, OPTIMAL_TOKENS * parameters)


def compute_budget(parameters: int, tokens: float | None = None) -> dict[str, Any]:
    """Budget of a model trained on `tokens` (default: as many as are optimal for its size), and the optimal size for
    the same budget."""
    budget = Budget(parameters, tokens or OPTIMAL_TOKENS * parameters)
    optimal = compute_optimal(budget.flops)
    return {
        "tokens": round(budget.tokens), "flops": budget.flops, "petaflop_days": budget.flops / PETAFLOP_DAY,
        "optimal": {"parameters": round(optimal.parameters), "tokens": round(optimal.tokens)},
    }  # fmt: skip


class PowerLaw(NamedTuple):
    """y = (scale / x) ^ exponent, as Kaplan et al. 2020 write L(N) = (N_c / N)^α. `r2`: share of the variance of log y
    that it explains."""

    scale: float
    exponent: float
    r2: float

    def __call__(self, x: float) -> float:
        return (self.scale / x) ** self.exponent


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Least squares of log y on log x. Raises UsageError for fewer than two different x, and for values that are not
    above 0."""
    if len(set(x)) < 2 or len(x) != len(y) or min(*x, *y) <= 0:
        raise UsageError(f"expected two or more different x, each with y, all above 0 (got {x!r:.60}, {y!r:.60})")
    a, b = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    slope, offset = np.polyfit(a, b, 1)
    rest, whole = b - (slope * a + offset), b - b.mean()
    r2 = 1 - float(rest @ rest) / float(whole @ whole) if float(whole @ whole) else 1.0
    scale = math.exp(min(-offset / slope, 700.0)) if slope else math.inf  # of points without a slope beyond floats
    return PowerLaw(scale, -float(slope), r2)
