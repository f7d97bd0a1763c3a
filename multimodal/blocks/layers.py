"""Norms, activations, feed-forward and stochastic depth."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def quick_gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """x·σ(1.702 x): the activation of OpenAI's CLIP weights."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu, "relu": F.relu, "silu": F.silu,
    "tanh": torch.tanh,
}  # fmt: skip


class PlusRMSNorm(nn.RMSNorm):
    """An RMS norm whose gain is 1 + weight (Gemma)."""

    @property
    def gain(self) -> Float[Tensor, "D"]:
        return 1.0 + self.weight.float()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return F.rms_norm(x.float(), self.normalized_shape, self.gain, self.eps).to(x.dtype)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": nn.LayerNorm, "layer_unbiased": partial(nn.LayerNorm, bias=False), "rms": nn.RMSNorm,
    "rms_plus": PlusRMSNorm,
}  # fmt: skip


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    """`layer` (Ba et al. 2016), `layer_unbiased`, `rms` (Zhang and Sennrich 2019) or `rms_plus`."""
    return NORMS[kind](width, eps=eps)


def has_hooks(model: nn.Module) -> bool:
    """Return True if a module has hooks that its calls run, such as those of pruning."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def is_customized(model: nn.Module) -> bool:
    """Return True if a module has hooks or a `forward` that is neither PyTorch's nor ours, as peft's adapters: what
    reads its weights in place of calling it would miss them."""
    return has_hooks(model) or any(
        "forward" in vars(part) or not type(part).forward.__module__.startswith(("torch.nn.", "multimodal."))
        for part in model.modules()
    )


class FeedForward(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x) when gated (Shazeer 2020). `inner_norm`: epsilon of a LayerNorm
    before `down` (EVA-02, Fang et al. 2023); None: none."""

    def __init__(self, width: int, hidden: int, activation: str, gated: bool = False, bias: bool = True,
                 dropout: float = 0.0, inner_norm: float | None = None):  # fmt: skip
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = nn.Linear(width, hidden, bias=bias)
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.norm = None if inner_norm is None else nn.LayerNorm(hidden, eps=inner_norm)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        hidden = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return self.down(self.dropout(hidden) if self.dropout.training else hidden)


class LayerScale(nn.Module):
    """A learned gain per channel on a residual branch (Touvron et al. 2021)."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        return x * self.gain


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drop a sample's residual branch, scaled to keep the mean."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        if not self.training or self.rate == 0.0:
            return x
        keep = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * keep / (1.0 - self.rate)
