"""All that a run depends on, as numbers, texts and tensors, and the way back."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from multimodal.errors import CheckpointError
from multimodal.tokens.records import from_record
from multimodal.train.optim import Average
from multimodal.train.shard_states import SHARDS, load_shards

if TYPE_CHECKING:
    import multimodal.train.loop


def snapshot(loop: "multimodal.train.loop.Loop") -> dict[str, Any]:
    """All that the run depends on; the order of the data follows from `done`. Called by all processes."""
    average = loop.average and {"weights": loop.average.weights, "updates": int(loop.average.updates)}
    return {
        "done": loop.done,
        "settings": loop.settings.flat(),
        "model": loop.objective.model.state_dict(),
        "optimizers": [{"kind": type(o).__name__, "state": o.state_dict()} for o in loop.optimizers],
        "average": average,
        "scaler": loop.scaler.state_dict(),
        "counters": {"read": sum(loop.processes.counts(loop.loader.read)),
                     "broken": sum(loop.processes.counts(loop.loader.broken)),
                     "not_finite": loop.not_finite, "in_row": loop.in_row, "evaluated": loop.evaluated},
        "random": random_state(),
    }  # fmt: skip


@dataclass(frozen=True)
class Counters:
    """Items read and broken, steps that were not finite, and the step of the last evaluation."""

    read: int
    broken: int
    not_finite: int
    in_row: int
    evaluated: int


@dataclass(frozen=True)
class StateRecord:
    """A state but for its tensors: see `snapshot`."""

    done: int
    settings: dict[str, Any]
    counters: Counters
    random: dict[str, Any]
    scaler: dict[str, Any]

    def __post_init__(self) -> None:
        if not 0 <= self.done < 1 << 48 or min(vars(self.counters).values()) < -1:
            raise CheckpointError(f"done {self.done}, counters {vars(self.counters)}: no run has such counts")


def restore(loop: "multimodal.train.loop.Loop", path: Path, state: dict[str, Any]) -> None:
    """The reverse of `snapshot`, from the folder of a state and what its `state.pt` holds. Raises ValueError, KeyError
    or RuntimeError where the state does not fit, CheckpointError where it is no state."""
    from_record(StateRecord, state, str(path / "state.pt"), others=True)
    if (path / SHARDS).is_dir():
        load_shards(loop, path)
        if loop.average and state["average"]:
            loop.average.updates = state["average"]["updates"]
    elif loop.settings.shard:
        raise ValueError("it was saved without --shard")
    else:
        restore_weights(loop, state)
    if loop.scaler.is_enabled() and state["scaler"]:
        loop.scaler.load_state_dict(state["scaler"])
    counters = state["counters"]
    if loop.rank == 0:  # the others begin at 0, so that the sums are right
        loop.loader.read, loop.loader.broken = counters["read"], counters["broken"]
    loop.not_finite, loop.in_row = counters["not_finite"], counters["in_row"]
    loop.evaluated, loop.done, loop.saved = counters["evaluated"], state["done"], state["done"]
    set_random_state(state["random"])


def restore_weights(loop: "multimodal.train.loop.Loop", state: dict[str, Any]) -> None:
    """Model, optimizers and average of a state that is in one piece."""
    loop.objective.model.load_state_dict(state["model"])
    for optimizer, saved in zip(loop.optimizers, state["optimizers"], strict=True):
        restore_optimizer(optimizer, saved)
    if loop.average and state["average"]:
        loop.average.load(**state["average"])
    elif loop.average:  # it begins with the weights of this step
        loop.average = Average(loop.objective.model, loop.settings.optim.average)


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Moments and step counts; the settings, such as weight decay, stay those that the run was started with."""
    if saved["kind"] != type(optimizer).__name__:
        raise ValueError(f"the optimizer was {saved['kind']}, now it is {type(optimizer).__name__}")
    now = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved["state"])
    for group, values in zip(optimizer.param_groups, now, strict=True):
        group.update(values)
    for parameter, held in optimizer.state.items():
        for name, value in held.items():
            if name != "step" and value.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, its parameter {tuple(parameter.shape)}")


def seed(number: int) -> None:
    """Of all libraries."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % (2**32 - 5))  # a prime, so that the high bits count


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
    if not 0 <= position <= len(words):  # numpy would read beyond its memory
        raise ValueError(f"numpy's random state stands at {position} of {len(words)}")
    np.random.set_state((kind, np.array(words, dtype=np.uint32), position, *rest))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
