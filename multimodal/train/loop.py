"""The training loop: owned by a recipe, which gives it an objective and a loader, and calls `fit`."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.data.loader import Loader, Step
from multimodal.errors import CheckpointError, TrainingError, UsageError
from multimodal.system.records import from_record
from multimodal.train.checkpoint.atomic import newest, read_state, save_state, saved_states
from multimodal.train.checkpoint.sharded import SHARDS, load_shards, save_shards
from multimodal.train.checkpoint.state import StateRecord, TrainingState, random_state, seed, set_random_state
from multimodal.train.device import (
    compile_blocks,
    counted,
    moved,
    peak_flops,
    recompute_blocks,
    running_statistics,
)
from multimodal.train.distributed.gradients import Parallel, gradients, norm
from multimodal.train.distributed.processes import Processes
from multimodal.train.figures import Figures
from multimodal.train.objective import Objective
from multimodal.train.optim import guarded, set_learning_rate, share_of_peak, tell
from multimodal.train.progress import Watch
from multimodal.train.settings import LoopSettings
from multimodal.train.signals import Stop, Stopped

log = logging.getLogger(__name__)

Evaluate = Callable[[nn.Module, int], dict[str, float]]


class Loop:
    """Model, optimisers, average and step count, which move together and are saved together.

    `evaluate(model, step)` is given the averaged model (the plain one where there is no average), in eval mode on the
    device, and after a signal is left (Stopped) at the next forward of a module. With `precision`
    - autocast: weights, optimizer and average in float32, matrix products in bfloat16;
    - bfloat16: weights and optimizer in bfloat16 too (small updates are lost), the average in float32;
    - float16: as autocast, with the loss scaled. A step that overflows lowers the scale and is no fault."""

    def __init__(self, settings: LoopSettings, objective: Objective, loader: Loader, evaluate: Evaluate | None = None):
        s = settings
        if loader.micro != s.accumulate:
            raise ValueError(f"the loader makes {loader.micro} micro-batches a step, the settings say {s.accumulate}")
        self.settings, self.loader, self.evaluate = s, loader, evaluate
        self.processes = Processes(s.device)
        self.world, self.rank, self.device = self.processes.world, self.processes.rank, self.processes.device
        loader.world, loader.rank = self.world, self.rank
        self.objective = objective.to(self.device)
        if s.precision == "bfloat16":
            objective.model.to(torch.bfloat16)
        self.kind = self.device.type
        self.statistics = running_statistics(objective.model)
        if s.checkpointing:
            recompute_blocks(objective.model)
        if s.compile:
            compile_blocks(objective.model)
        self.plain = copy.deepcopy(objective.model).cpu() if s.shard and self.processes.main else None
        self.parallel = Parallel(objective, self.processes, s.shard)
        scaler = torch.amp.GradScaler(self.kind, enabled=s.precision == "float16")
        self.state = TrainingState(objective.model, s.optim, scaler)
        # else the host has to look before each update
        self.guarded = all(map(guarded, self.state.optimizers)) and not self.state.scaler.is_enabled() and not s.shard
        self.states = s.run / "states"
        self.done = 0  # steps
        self.flops: int | None = None  # of the first step of this process
        self.saved = self.evaluated = -1  # the step it was done last at
        self.unsaved: TrainingError | None = None  # why the last save failed
        self.not_finite = self.in_row = 0  # steps that were left out: in all, since the last good one
        self.figures, self.metrics = Figures(self.device), {"loss": math.nan, "norm": math.nan}
        self.watch: Watch | None = None
        self.notes: dict[int, dict[str, Any]] = {}  # what the watch is to be told of steps, beside their figures

    # what an objective may use
    def forward(self, batch: Any) -> Any:
        kinds = {"autocast": torch.bfloat16, "float16": torch.float16}
        kind = kinds.get(self.settings.precision)
        with torch.autocast(self.kind, kind) if kind else nullcontext():
            return self.parallel.module(batch)

    def last(self, yes: bool) -> AbstractContextManager:
        return self.parallel.last(yes)

    def backward(self, loss: Tensor) -> None:
        self.state.scaler.scale(loss).backward()

    def total(self, value: Tensor) -> Tensor:
        return self.processes.total(value)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.settings.optim.rate * share_of_peak(self.settings.optim, self.done, self.settings.steps)

    def step(self, batches: list[Any]) -> dict[str, float]:
        """One step on micro-batches. What is not finite changes nothing but the counters; `loss` is NaN where there
        was no whole item.

        Gives the newest figures: on a CPU those of this step; on a GPU those of the step before, since the host does
        not wait for what it has just asked for (`read` does)."""
        metrics, tried = self._computed(batches)
        self.done += 1
        self.figures.put(self.done, metrics, tried)
        self.read(self.figures.behind)
        return self.metrics

    def _computed(self, batches: list[Any]) -> tuple[dict[str, Tensor | float], bool]:
        """Figures of a step, and whether it counts as one that was tried."""
        s = self.settings
        # dropout of a resumed run is that of an unbroken one, and each process drops other things
        seed(s.seed * 1_000_003 + self.done + (self.rank << 40))
        self.objective.train().zero_grad()
        if not batches:
            return {"loss": math.nan, "norm": math.nan}, False
        before = [buffer.clone() for buffer in self.statistics]
        floating = torch.bfloat16 if s.precision == "bfloat16" else None
        metrics = self._backward([moved(batch, self.device, floating) for batch in batches])
        self.parallel.finish()
        for optimizer in self.state.optimizers:
            self.state.scaler.unscale_(optimizer)
        kinds, loss = gradients(self.objective.model.parameters()), torch.as_tensor(metrics["loss"])
        size = norm(kinds)
        good, tried = size.isfinite() & loss.isfinite(), True
        for buffer, old in zip(self.statistics, before, strict=True):
            buffer.copy_(torch.where(good, buffer, old))
        if self.guarded:
            self._update(kinds, size, good)
        elif good:
            self._update(kinds, size, True)
        else:  # where the scale was too large, it is no fault: what remains at a scale of 1 is one
            tried = not (loss.isfinite() and self.state.scaler.get_scale() > 1)
        if self.state.scaler.is_enabled():
            self.state.scaler.update()
        return metrics | {"norm": size}, tried

    def _backward(self, batches: list[Any]) -> dict[str, Tensor | float]:
        """The first step on a GPU whose peak is known counts its arithmetic."""
        if self.flops is not None or not peak_flops():
            return self.objective.backward(self, batches)
        metrics, self.flops = counted(lambda: self.objective.backward(self, batches))
        return metrics

    def _update(self, kinds: list[list[Tensor]], size: Tensor, good: Tensor | bool) -> None:
        """`size`: the norm of the gradients `kinds`. Nothing changes where not `good`."""
        most = self.settings.optim.clip
        over = (size / most).clamp(min=1).float() if most else None
        if over is not None and (self.kind == "cpu" or not self.guarded) and not over > 1:
            over = None
        if over is not None and not self.guarded:
            for kind in kinds:
                torch._foreach_div_(kind, float(over))
        for optimizer in self.state.optimizers:
            set_learning_rate(optimizer, self.rate)
            if self.guarded:
                tell(optimizer, good, over)
            self.state.scaler.step(optimizer)
        self.objective.after_step()
        if self.state.average:
            self.state.average.update(self.objective.model, good)

    def read(self, behind: int = 0) -> None:
        """Counts and tells the figures of all steps but the newest `behind`."""
        for number, found, tried in self.figures.read(behind):
            self.metrics = found
            if tried and math.isfinite(found["loss"]) and math.isfinite(found["norm"]):
                self.in_row = 0
            elif tried:
                self.not_finite, self.in_row = self.not_finite + 1, self.in_row + 1
                log.warning("step %d left out: loss %g, norm %g", number, found["loss"], found["norm"])
            note = self.notes.pop(number, None)
            if note is not None and self.watch:
                self.watch.step(number, found, skipped=self.not_finite, **note)

    def fit(self) -> nn.Module:
        """Runs to the last step; gives the trained model (averaged), in float32 and eval mode on the CPU. Of several
        processes only the first comes back: the others end here (SystemExit 0), so that a recipe saves once.

        Raises Stopped after a signal, with the state saved; TrainingError where too many steps in a row were not
        finite or the last state could not be saved; CheckpointError where a state does not fit; UsageError where
        `run` holds states and `resume` was not asked for."""
        s = self.settings
        if s.threads:
            torch.set_num_threads(s.threads)
        with Stop() as stop, self.processes.together():
            self.begin()
            if self.rank == 0:
                self.watch = Watch(s.run, s.steps, s.log_every, self.done, s.device, self.world)
            steps = self.loader.start(self.done, stop.check)
            try:
                self._evaluate(stop)  # a run that was stopped there still owes it
                while self.done < s.steps:
                    self._one(self._next(steps))
                    self._evaluate(stop)
                    if self.done % s.save_every == 0 or self.done == s.steps:
                        self.save()
                self.processes.agree(Stopped(stop.asked) if stop.asked else None)
            except Stopped:
                self.save()
                if self.unsaved is None:
                    raise
            finally:
                steps.close()
                if self.watch:
                    self.watch.close()
        if self.unsaved:
            raise self.unsaved
        model = self.trained()
        self.processes.close()
        if model is None:
            raise SystemExit(0)
        return model.cpu()

    def _next(self, steps: Iterator[Step]) -> Step:
        """What to train on next. A signal or an error in one of several processes ends all of them here."""
        step = error = None
        try:
            step = next(steps)
        except (Stopped, Exception) as found:
            error = found
        self.processes.agree(error)
        return step

    def _one(self, step: Step) -> None:
        s, number, broken = self.settings, self.done + 1, self.loader.broken
        logged = number % s.log_every == 0 or number == s.steps
        if logged:
            broken = sum(self.processes.counts(broken))
        self.notes[number] = {"rate": self.rate, "items": step.count * self.world, "wait": step.waited,
                              "padding": step.padding, "broken": broken}  # fmt: skip
        self.step(step.batches)
        if self.watch and self.watch.flops is None and self.flops and step.count:
            self.watch.flops = self.flops / step.count
        if logged or number % s.save_every == 0 or number % s.evaluate_every == 0:
            self.read()
        if self.in_row >= s.most_not_finite:
            newest = f"the newest state is of step {self.saved}" if self.saved >= 0 else "no state was saved"
            last = number - len(self.figures.waiting)
            raise TrainingError(
                f"step {last}: {self.in_row} steps in a row were not finite (--most_not_finite); {newest}"
            )

    def _evaluate(self, stop: Stop) -> None:
        s = self.settings
        due = self.done and (self.done % s.evaluate_every == 0 or self.done == s.steps)
        if self.evaluate and due and self.evaluated != self.done:
            model = self.trained()
            figures = self.processes.on_main(lambda: self._figures(model, stop))
            self.evaluated = self.done
            if self.watch:
                self.watch.evaluated(self.done, figures)

    def _figures(self, model: nn.Module, stop: Stop) -> dict[str, float]:
        with stop.checking():
            return self.evaluate(model, self.done)

    def trained(self) -> nn.Module | None:
        """A copy of the model with the averaged weights (where there is an average), on the device. Called by all
        processes, of which only the first gets it."""
        weights = self.state.average.weights if self.state.average else {}
        if self.settings.shard:
            weights = self.parallel.full(weights or self.objective.model.state_dict())
        if not self.processes.main:
            return None
        model = copy.deepcopy(self.objective.model if self.plain is None else self.plain).to(self.device)
        if self.settings.precision == "bfloat16":
            model.float()
        if weights:
            model.load_state_dict(weights)
        return model.eval()

    def begin(self) -> None:
        """Goes to the newest state where `resume` is set. Raises UsageError where it is not, and there are states: a
        new run would mix with the old one."""
        if self.settings.resume:
            self.resume()
        else:
            self.processes.on_main(self._refuse_old_states)

    def _refuse_old_states(self) -> None:
        if old := saved_states(self.states):
            raise UsageError(f"--run {self.settings.run}: holds {old[-1].name}; go on with --resume, or name another")

    def state_dict(self) -> dict[str, Any]:
        """All that the run depends on; the order of the data follows from `done`. All processes call this."""
        read, broken = (sum(self.processes.counts(n)) for n in (self.loader.read, self.loader.broken))
        return {
            "done": self.done, "settings": self.settings.flat(), **self.state.state_dict(),
            "counters": {"read": read, "broken": broken, "not_finite": self.not_finite, "in_row": self.in_row,
                         "evaluated": self.evaluated},
            "random": random_state(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError, KeyError or RuntimeError where the state does not fit."""
        self.state.load_state_dict(state)
        self._load_counters(state)

    def _load_counters(self, state: dict[str, Any]) -> None:
        counters = state["counters"]
        if self.rank == 0:  # the others begin at 0, so that the sums are right
            self.loader.read, self.loader.broken = counters["read"], counters["broken"]
        self.not_finite, self.in_row = counters["not_finite"], counters["in_row"]
        self.evaluated, self.done, self.saved = counters["evaluated"], state["done"], state["done"]
        set_random_state(state["random"])

    def _restore(self, path: Path, state: dict[str, Any]) -> None:
        from_record(StateRecord, state, str(path / "state.pt"), others=True)
        if (path / SHARDS).is_dir():
            load_shards(path, state, self.state, self.processes)
            self._load_counters(state)
        elif self.settings.shard:
            raise ValueError("it was saved without --shard")
        else:
            self.load_state_dict(state)

    def save(self) -> None:
        """Where the state cannot be written, training goes on, and the run fails if it ends so."""
        if self.saved == self.done:
            return
        self.read()
        state = self.state_dict()
        fault = ""
        try:
            if self.settings.shard:
                save_shards(self.states, self.done, state, self.state.tensors(), self.processes, self.settings.keep)
            elif self.processes.main:
                save_state(self.states, self.done, state, self.settings.keep)
        except TrainingError as error:
            fault = str(error)
        fault = self.processes.tell(fault)
        if fault:
            self.unsaved = TrainingError(fault)
            log.error("%s; training goes on, and earlier states stay as they were", fault)
        else:
            self.saved, self.unsaved = self.done, None

    def resume(self) -> None:
        """Raises CheckpointError where no state can be read, or the newest does not fit this model and optimizer."""
        place = self.processes.on_main(lambda: newest(self.states, _read))
        name = self.processes.tell(place[0].name if place else "")
        if not name:
            log.info("--resume: no state in %s, so the run begins", self.states)
            return
        state = place[1] if place else _read(self.states / name)[1]
        try:
            self._restore(self.states / name, state)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            cause = " ".join(str(error).split())
            where = f"{self.states}: state of step {state.get('done')}"
            raise CheckpointError(f"{where}: does not fit this run: {cause[:300]}") from None
        other = {name: value for name, value in self.settings.flat().items() if state["settings"].get(name) != value}
        other = [f"--{name} {value} (was {state['settings'].get(name)})" for name, value in other.items()]
        log.info("resumed after step %d%s", self.done, "".join(f", now with {', '.join(other)}" if other else ""))


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    return path, read_state(path)
