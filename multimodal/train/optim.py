"""Optimizers, parameter groups, learning rate schedules and weight averaging."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from multimodal.errors import UsageError, demand
from multimodal.inference.prepare import prefers_bfloat16
from multimodal.system.options import (
    Limits,
    Natural,
    NonNegativeFloat,
    PositiveFloat,
    PositiveShare,
    Rate,
    Share,
    check_limits,
)


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer, learning rate and averaging."""

    rate: PositiveFloat = 1e-3  # peak learning rate
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: Natural = 100  # steps
    floor: Share = 0.0  # learning rate at the end, as a share of the peak
    decay: PositiveShare = 0.2  # share of the steps at the end in which wsd decays
    weight_decay: NonNegativeFloat = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    clip: Annotated[float, Limits(0)] = 1.0  # limit of the gradient's norm; 0: no limit
    average: Rate = 0.0  # decay of the moving average of the weights; 0: none

    def __post_init__(self):
        check_limits(self)
        demand("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to under 1")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Split trained parameters: matrices decay; norms, biases, scales, class tokens, registers and other vectors do
    not, as in open_clip and timm."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tokens = ("class_token", "registers")
    free = {name: p for name, p in trained.items() if p.ndim < 2 or name.rpartition(".")[2] in tokens}
    return [
        {"params": [p for name, p in trained.items() if name not in free], "weight_decay": weight_decay},
        {"params": list(free.values()), "weight_decay": 0.0},
    ]


def make_contiguous(model: nn.Module) -> None:
    """Make trained parameters contiguous. On a CPU PyTorch's fused AdamW ignores strides and would update a view, such
    as GPT-2's transposed thirds, in the wrong places."""
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


class Muon(torch.optim.Muon):
    """Muon (Jordan et al. 2024): torch's with `match_rms_adamw` rates, its settings and states, and three changes:

    - all matrices of a shape are orthogonalized in one batch;
    - a CPU without quick bfloat16 products computes in float32 (2 to 30 times as fast there);
    - `found_inf` and `grad_scale`, which `guard_step` sets, skip the step or divide the gradients on the device, so
      that the host does not wait for the gradients' norm.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, params: Any, lr: float, weight_decay: float):
        super().__init__(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            shapes = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.device, *sorted(parameter.shape)].append(parameter)
            for parameters in shapes.values():
                self._step_together(group, parameters)

    def _step_together(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters of one shape or its transpose."""
        good: Tensor | float = 1.0 if self.found_inf is None else 1 - self.found_inf
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        if self.grad_scale is not None:
            torch._foreach_div_([parameter.grad for parameter in parameters], self.grad_scale)
        gradients, momenta = _stacked([parameter.grad for parameter in parameters]), _stacked(buffers)
        if isinstance(good, Tensor):  # a product with 0 would keep NaN
            gradients = torch.where(good > 0, gradients, 0)
        momenta.lerp_(gradients, torch.as_tensor((1 - group["momentum"]) * good, dtype=momenta.dtype))
        directions = orthogonalized(gradients.lerp(momenta, group["momentum"]), group)
        scale = -group["lr"] * 0.2 * math.sqrt(max(parameters[0].shape))
        torch._foreach_copy_(buffers, _unstacked(momenta, buffers))
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"] * good)
        torch._foreach_add_(parameters, _unstacked(directions * (scale * good), parameters))


def orthogonalized(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Orthogonalize wide matrices [N rows cols] by Newton-Schulz iterations, with a Muon group's settings."""
    fast = matrices.device.type != "cpu" or prefers_bfloat16()
    x = matrices.bfloat16() if fast else matrices.float()
    x = x / x.flatten(1).norm(dim=1).clamp(min=group["eps"])[:, None, None]
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _stacked(matrices: list[Tensor]) -> Tensor:
    """Stack matrices, tall ones transposed."""
    return torch.stack([matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices])


def _unstacked(stacked: Tensor, like: list[Tensor]) -> list[Tensor]:
    stacked = stacked.to(like[0].dtype)  # one launch on a GPU, in place of one a matrix
    return [
        (one.mT if old.shape[0] > old.shape[1] else one).to(old.dtype)
        for one, old in zip(stacked.unbind(), like, strict=True)
    ]


def optimizers(model: nn.Module, s: OptimSettings) -> list[torch.optim.Optimizer]:
    """Build AdamW; or Muon (Jordan et al. 2024) for the matrices inside blocks and AdamW for embeddings, heads, norms
    and biases. Raises UsageError for a model without parameters to train."""
    make_contiguous(model)
    groups = parameter_groups(model, s.weight_decay)
    if not any(group["params"] for group in groups):
        raise UsageError("the model has no parameters to train (0 with requires_grad)")
    built: list[torch.optim.Optimizer] = []
    if s.optimizer == "muon":
        inner = {id(p) for name, p in model.named_parameters() if ".blocks." in f".{name}"}
        matrices = [p for p in groups[0]["params"] if p.ndim == 2 and id(p) in inner]
        if not matrices:
            raise UsageError("muon: the model has no trained matrices inside blocks", argument="optimizer")
        taken = {id(p) for p in matrices}
        groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in taken]
        built.append(Muon(matrices, s.rate, s.weight_decay))
    groups = [group for group in groups if group["params"]]
    if groups:
        built.append(torch.optim.AdamW(groups, lr=s.rate, betas=s.betas, fused=True))
    return built


def share_of_peak(s: OptimSettings, step: int, total: int) -> float:
    """Return the share of the peak learning rate at `step`: a linear warm-up, then a half cosine down to the floor at
    `total` (Loshchilov and Hutter 2017), or a constant with a linear decay over the last steps (WSD, Hu et al.
    2024)."""
    rising = min(1.0, (step + 1) / max(1, s.warmup))
    if s.schedule == "wsd":
        return min(rising, max(s.floor, min(1.0, (total - step) / max(1.0, s.decay * total))))
    if step < s.warmup:
        return rising
    done = min(1.0, (step - s.warmup) / max(1, total - s.warmup))
    return s.floor + (1 - s.floor) * 0.5 * (1 + math.cos(math.pi * done))


def guard_step(optimizer: torch.optim.Optimizer, good: Tensor, over: Tensor | None) -> None:
    """Make the optimizer's next step divide its gradients by `over`, in the same pass over memory, or change
    nothing unless `good`, through the attributes that `torch.amp.GradScaler` sets for the fused step."""
    optimizer.found_inf, optimizer.grad_scale = (~good).float(), over


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """Set a number, or for a step that is captured as a CUDA graph a tensor of the device."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if "capturable" in group:
            group["capturable"] = isinstance(rate, Tensor)


class Average:
    """Exponential moving average of a model's weights (Polyak and Juditsky 1992), in float32 or better."""

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.live = model.state_dict()  # tensors of the model, which optimizers change in place
        self.weights = {name: _wide(tensor.detach()).clone() for name, tensor in self.live.items()}

    @torch.no_grad()
    def update(self, good: Tensor | bool = True) -> None:
        """Blend in the model's weights; nothing changes unless `good`, a bool or a tensor on the device."""
        if isinstance(good, Tensor) and not isinstance(self.updates, Tensor):
            self.updates = torch.tensor(self.updates, device=good.device)
        self.updates += good
        # lets early averages follow instead of remembering the random start
        early = (1 + self.updates) / (10 + self.updates)
        decay = early.clamp(max=self.decay) if isinstance(early, Tensor) else min(self.decay, early)
        share, kinds = (1 - decay) * good, defaultdict[type, list[str]](list)  # plain or sharded
        for name, tensor in self.live.items():
            if tensor.is_floating_point():
                kinds[type(tensor)].append(name)
            else:
                self.weights[name].copy_(tensor)
        for names in kinds.values():
            own, new = [self.weights[name] for name in names], [_wide(self.live[name]) for name in names]
            if isinstance(share, Tensor):  # few launches on a GPU
                torch._foreach_add_(own, torch._foreach_mul(torch._foreach_sub(new, own), share.to(own[0])))
            else:
                torch._foreach_lerp_(own, new, share)

    def load(self, weights: dict[str, Tensor], updates: int) -> None:
        """Load a saved average. Raises ValueError for other names or shapes."""
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in self.weights.items()}:
            raise ValueError("the average's names or shapes differ from the model's")
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
        self.updates = updates


def _wide(tensor: Tensor) -> Tensor:
    small = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if small else tensor
