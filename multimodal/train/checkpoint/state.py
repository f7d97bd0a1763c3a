"""Training state and random generators as dicts of numbers, strings and tensors, and back."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multimodal.errors import CheckpointError
from multimodal.train.optim import Average, OptimSettings, optimizers


@dataclass(frozen=True)
class Counters:
    """Items read and broken, steps skipped as not finite, and the step of the last evaluation."""

    read: int
    broken: int
    not_finite: int
    in_row: int
    evaluated: int


@dataclass(frozen=True)
class StateRecord:
    """A state without its tensors; see `Loop.state_dict`."""

    done: int
    settings: dict[str, Any]
    counters: Counters
    random: dict[str, Any]
    scaler: dict[str, Any]
    meaning: dict[str, list[str]]
    epoch: str

    def __post_init__(self) -> None:
        if not 0 <= self.done < 1 << 48 or min(vars(self.counters).values()) < -1:
            raise CheckpointError(f"done {self.done}, counters {vars(self.counters)}: counts out of range")


class TrainingState:
    """Weights, their average, optimizers and the loss scale, with PyTorch's `state_dict` and `load_state_dict`."""

    def __init__(self, model: nn.Module, settings: OptimSettings, scaler: torch.amp.GradScaler):
        self.model, self.settings, self.scaler = model, settings, scaler
        self.optimizers = optimizers(model, settings)
        self.parameters = list(model.parameters())  # to walk through the modules in each step would keep a GPU waiting
        self.average = Average(model, settings.average) if settings.average else None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        average = self.average and {"weights": self.average.weights, "updates": int(self.average.updates)}
        return {
            "model": self.model.state_dict(),
            "optimizers": [{"kind": type(o).__name__, "state": o.state_dict()} for o in self.optimizers],
            "average": average,
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or RuntimeError for a state that does not fit."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            restore_optimizer(optimizer, saved)
        if self.average and state["average"]:
            self.average.load(**state["average"])
        elif self.average:
            self.restart_average()
        self.load_scale(state)

    def load_scale(self, state: dict[str, Any]) -> None:
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def restart_average(self) -> None:
        """Restart the average from the current weights."""
        self.average = Average(self.model, self.settings.average)

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, average and optimizer states by name, sharing their storage."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.average:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.weights.items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state.items():
                tensors |= {f"optimizers.{number}.{key}.{names[parameter]}": value for key, value in state.items()}
        return {name: tensor if tensor.ndim else tensor.view(1) for name, tensor in tensors.items()}

    def begin_optimizers(self) -> None:
        """Create the optimizers' states by a step, whose effect is then overwritten."""
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load moments and step counts; settings such as weight decay stay those of this run."""
    if saved["kind"] != type(optimizer).__name__:
        raise ValueError(f"expected a state of {type(optimizer).__name__}, got one of {saved['kind']}")
    now = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved["state"])
    for group, values in zip(optimizer.param_groups, now, strict=True):
        group.update(values)
    for parameter, held in optimizer.state.items():
        for name, value in held.items():
            if name != "step" and value.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def seed(number: int) -> None:
    """Seed torch, Python and numpy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % (2**32 - 5))  # a prime: the high bits count


def random_state() -> dict[str, Any]:
    kind, words, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": [kind, words.tolist(), *rest],
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, words, position, *rest = state["numpy"]
    if not 0 <= position <= len(words):  # numpy does not check
        raise ValueError(f"numpy's random state: position {position} is out of range (0 to {len(words)})")
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, *rest))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
