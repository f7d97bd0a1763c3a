"""Training loop: a recipe builds a `Loop` from its settings, objective and loader, and calls `fit`."""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.data.loader import Loader, Step
from multimodal.errors import CheckpointError, TrainingError, demand, one_line
from multimodal.system.memory import keeping_memory
from multimodal.system.records import from_record
from multimodal.train.checkpoint.atomic import newest_state, read_state, refuse_states, save_state
from multimodal.train.checkpoint.meaning import check_meaning, meaning_of
from multimodal.train.checkpoint.sharded import SHARDS, load_shards, save_shards
from multimodal.train.checkpoint.state import StateRecord, TrainingState, random_state, seed, set_random_state
from multimodal.train.device import (
    compile_blocks,
    deterministic,
    moved,
    recompute_blocks,
    running_statistics,
    sizes,
    tf32,
)
from multimodal.train.distributed.gradients import DataParallel, gradients, norm
from multimodal.train.distributed.processes import Processes
from multimodal.train.flops import FlopCounter, elements
from multimodal.train.lora import adapters
from multimodal.train.metrics.progress import TrainingLog, is_logged
from multimodal.train.metrics.queue import MetricsQueue
from multimodal.train.objective import Objective
from multimodal.train.optim import guard_step, set_learning_rate, share_of_peak
from multimodal.train.settings import LoopSettings
from multimodal.train.signals import Stopped, StopSignal
from multimodal.train.step_graphs import StepGraphs
from multimodal.weights.folder import Checkpoint

log = logging.getLogger(__name__)

Evaluate = Callable[[nn.Module, int], dict[str, float | None]]


class Loop:
    """Model, optimizers, average and step count, which change and are saved together.

    `start`: checkpoint whose labels and tokenizer a state to resume from must share.
    `evaluate(model, step)` gets the averaged model (the trained one without an average) in eval mode on the device; a
    signal ends it (Stopped) at the next forward of a module. `precision`:
    - auto: autocast where the device multiplies bfloat16 quicker (GPUs, most newer CPUs), else float32;
    - autocast: weights, optimizer and average in float32, matrix products in bfloat16;
    - bfloat16: weights and optimizer in bfloat16 too (small updates are lost), the average in float32;
    - float16: as autocast, with a scaled loss. A step that overflows lowers the scale and does not count as failed."""

    def __init__(
        self, settings: LoopSettings, objective: Objective, loader: Loader, evaluate: Evaluate | None = None,
        start: Checkpoint | None = None,
    ):  # fmt: skip
        s = settings
        if loader.micro != s.accumulate:
            raise ValueError(f"loader.micro must equal settings.accumulate ({loader.micro}, {s.accumulate})")
        self.settings, self.loader, self.evaluate = s, loader, evaluate
        self.processes = Processes(s.device)
        self.world, self.rank, self.device = self.processes.world, self.processes.rank, self.processes.device
        demand("graphs", s.graphs, self.world == 1 or not s.graphs, "off with several processes")
        loader.world, loader.rank = self.world, self.rank
        self.objective = objective.to(self.device)
        self.floating = torch.bfloat16 if s.used_precision == "bfloat16" else None
        if self.floating:
            objective.model.to(self.floating)
        self.kind, self.statistics = self.device.type, running_statistics(objective.model)
        if s.checkpointing:
            recompute_blocks(objective.model)
        if s.compile:
            compile_blocks(objective.model)
        self.plain = copy.deepcopy(objective.model).cpu() if s.shard and self.processes.main else None
        types = (torch.bfloat16, getattr(torch, s.reduce)) if s.used_precision == "autocast" else ()
        self.parallel = DataParallel(objective, self.processes, s.shard, s.hybrid, *types)
        scaler = torch.amp.GradScaler(self.kind, enabled=s.used_precision == "float16")
        self.state = TrainingState(objective.model, s.optim, scaler)
        self.states, self.meaning = s.run / "states", adapters(objective.model) | (meaning_of(start) if start else {})
        self.done = self.first = 0  # completed steps, now and at the start of this process
        self.flops = FlopCounter()
        self.saved = self.evaluated = -1  # last step saved, last step evaluated
        self.unsaved: TrainingError | None = None  # cause of the last failed save
        self.not_finite = self.in_row = 0  # skipped steps: in total, since the last good one
        self.pending, self.metrics = MetricsQueue(self.device), {"loss": math.nan, "norm": math.nan}
        self.graphs = StepGraphs(self.state, self.device) if s.graphs else None
        self.log: TrainingLog | None = None
        self.notes: dict[int, dict[str, Any]] = {}  # what to log of pending steps beside their metrics

    # the Engine of an objective
    def forward(self, batch: Any) -> Any:
        kind = {"autocast": torch.bfloat16, "float16": torch.float16}.get(self.settings.used_precision)
        with torch.autocast(self.kind, kind) if kind else nullcontext():
            self.flops.count_forward(self.objective, batch)
            return self.parallel.module(batch)

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return self.parallel.micro_batch(last)

    def backward(self, loss: Tensor) -> None:
        self.state.scaler.scale(loss).backward()

    def total(self, value: Tensor) -> Tensor:
        return self.processes.total(value)

    @property
    def guarded(self) -> bool:
        """Optimizers skip and scale on the device; otherwise the host reads the gradient norm first."""
        return not self.state.scaler.is_enabled() and not self.settings.shard

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return self.settings.optim.rate * share_of_peak(self.settings.optim, self.done, self.settings.steps)

    def step(self, batches: list[Any]) -> dict[str, float]:
        """Run one step on micro-batches. A loss or gradient that is not finite changes nothing but the counters; `loss`
        is NaN for a step without items.

        Returns the newest metrics: of this step on a CPU, of the step before on a GPU, whose result the host does not
        wait for."""
        metrics, counted = self._compute(batches)
        self.done += 1
        self.pending.push(self.done, metrics, counted)
        self.read_metrics(self.pending.delay)
        return self.metrics

    def _compute(self, batches: list[Any]) -> tuple[dict[str, Tensor | float], bool]:
        """Return the metrics of a step, and False for a step that does not count as tried."""
        # a function of the step, so that a resumed run repeats its dropout; each process has its own
        seed(self.settings.seed * 1_000_003 + self.done + (self.rank << 40))
        if not batches:
            return {"loss": math.nan, "norm": math.nan}, False
        batches = [self.objective.at_step(moved(batch, self.device, self.floating), self.done) for batch in batches]
        self.notes.get(self.done + 1, {})["elements"] = sum(map(elements, batches)) * self.world
        if self.graphs:
            return self.graphs(batches, self._work, self.rate)
        return self._work(batches, self.rate)

    def _work(self, batches: list[Any], rate: float | Tensor) -> tuple[dict[str, Tensor | float], bool]:
        """Run forward, backward and the optimizers on batches of the device."""
        self.objective.train()
        self.state.zero_grad()
        before = [buffer.clone() for buffer in self.statistics]
        metrics = self.flops.count_step(lambda: self.objective.backward(self, batches), batches)
        self.parallel.finish()
        for optimizer in self.state.optimizers:
            self.state.scaler.unscale_(optimizer)
        groups, loss = gradients(self.state.parameters), torch.as_tensor(metrics["loss"])
        size = norm(groups)
        good, counted = size.isfinite() & loss.isfinite(), True
        for buffer, old in zip(self.statistics, before, strict=True):
            buffer.copy_(torch.where(good, buffer, old))
        if self.guarded:
            self._update(groups, size, good, rate)
        elif good:
            self._update(groups, size, True, rate)
        else:  # too large a loss scale is not a failed step; at a scale of 1 it is
            counted = not (loss.isfinite() and self.state.scaler.get_scale() > 1)
        self.state.scaler.update()
        return metrics | {"norm": size}, counted

    def _update(
        self, groups: list[list[Tensor]], size: Tensor, good: Tensor | bool, rate: float | Tensor
    ) -> None:  # fmt: skip
        """Step the optimizers with gradients `groups` of norm `size`; nothing changes unless `good`."""
        limit = self.settings.optim.clip
        over = (size / limit).clamp(min=1).float() if limit else None
        if over is not None and (self.kind == "cpu" or not self.guarded) and not over > 1:
            over = None
        if over is not None and not self.guarded:
            for group in groups:
                torch._foreach_div_(group, float(over))
        for optimizer in self.state.optimizers:
            set_learning_rate(optimizer, rate)
            if self.guarded:
                guard_step(optimizer, good, over)
            self.state.scaler.step(optimizer)
        self.objective.after_step()
        if self.state.average:
            self.state.average.update(good)

    def read_metrics(self, delay: int = 0) -> None:
        """Count and log the metrics of all steps but the newest `delay`."""
        for number, metrics, counted in self.pending.pop(delay):
            self.metrics = metrics
            if counted and math.isfinite(metrics["loss"]) and math.isfinite(metrics["norm"]):
                self.in_row = 0
            elif counted:
                self.not_finite, self.in_row = self.not_finite + 1, self.in_row + 1
                log.warning("step %d skipped: loss %g, norm %g", number, metrics["loss"], metrics["norm"])
            note = self.notes.pop(number, None)
            if note is not None and self.log:
                self.log.step(number, metrics, skipped=self.not_finite, **note)

    def fit(self) -> nn.Module:
        """Train to the last step. Returns the trained (averaged) model in float32 and eval mode on the CPU. Of several
        processes only the first returns; the others exit here (SystemExit 0), so that a recipe saves once.

        Raises Stopped after a signal, with the state saved; TrainingError if too many consecutive steps were not finite
        or the last state could not be saved; CheckpointError if a state does not fit; UsageError if `run` holds states
        and `resume` is off."""
        s = self.settings
        if s.threads:
            torch.set_num_threads(s.threads)
        reduced = self.kind == "cuda" and s.used_precision != "float32"
        memory = keeping_memory() if self.kind == "cpu" else nullcontext()
        mode = deterministic(s.deterministic)
        with memory, mode, tf32(reduced), StopSignal() as stop, self.processes.together(s.run):
            log.info("%d parameters, %d of them trained", *sizes(self.objective.model))
            self.begin()
            if self.rank == 0:
                self.log = TrainingLog(
                    s.run, s.steps, s.log_every, self.done, s.device, self.world, self.evaluated == self.done
                )
                if s.optim.warmup > s.steps:
                    log.warning("warmup %d: %d steps end before the peak learning rate", s.optim.warmup, s.steps)
            steps = self.loader.start(self.done, stop.check)
            try:
                self._evaluate(stop)  # due if a signal ended it in the previous run
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
                if self.log:
                    self.log.close()
        if self.unsaved:
            raise self.unsaved
        model = self.trained()
        self.processes.close()
        if model is None:
            raise SystemExit(0)
        return model.cpu()

    def _next(self, steps: Iterator[Step]) -> Step:
        """Return the next step's batches. A signal or an error in one process ends all of them here."""
        step = error = None
        try:
            step = next(steps)
        except (Stopped, Exception) as cause:
            error = cause
        self.processes.agree(error)
        return step

    def _one(self, step: Step) -> None:
        s, number, broken = self.settings, self.done + 1, self.loader.broken
        logged = is_logged(number, self.first, s.log_every, s.steps)
        if logged:
            broken = sum(self.processes.counts(broken))
        self.notes[number] = {"rate": self.rate, "items": step.count * self.world, "wait": step.waited,
                              "padding": step.padding, "broken": broken}  # fmt: skip
        self.step(step.batches)
        if self.log:
            self.log.flops = self.flops.step
        if logged or number % s.save_every == 0 or number % s.evaluate_every == 0:
            self.read_metrics()
        if self.in_row >= s.most_not_finite:
            kept = f"the newest state is of step {self.saved}" if self.saved >= 0 else "no state was saved"
            problem = f"{self.in_row} steps in a row were not finite (most_not_finite)"
            raise TrainingError(f"step {number - len(self.pending.waiting)}: {problem}; {kept}")

    def _evaluate(self, stop: StopSignal) -> None:
        s = self.settings
        due = self.done and (self.done % s.evaluate_every == 0 or self.done == s.steps)
        if not self.evaluate or not due or self.evaluated == self.done:
            return
        began = time.monotonic()
        with self._announced("evaluating"):
            model = self.trained()
            metrics = self.processes.on_main(lambda: self._metrics(model, stop))
        self.evaluated = self.done
        if self.log:
            self.log.evaluated(self.done, metrics, time.monotonic() - began)

    def _announced(self, work: str) -> AbstractContextManager:
        return self.log.paused(f"step {self.done}/{self.settings.steps}: {work}") if self.log else nullcontext()

    def _metrics(self, model: nn.Module, stop: StopSignal) -> dict[str, float | None]:
        with stop.checking():
            return self.evaluate(model, self.done)

    def trained(self) -> nn.Module | None:
        """Return a copy of the model, with averaged weights if there are any, on the device. All processes call this;
        only the first gets the model."""
        weights = self.state.average.weights if self.state.average else {}
        if self.settings.shard:
            weights = self.parallel.full(weights or self.objective.model.state_dict())
        if not self.processes.main:
            return None
        model = copy.deepcopy(self.objective.model if self.plain is None else self.plain).to(self.device)
        model = model.float() if self.floating else model
        if weights:
            model.load_state_dict(weights)
        return model.eval()

    def begin(self) -> None:
        """Load the newest state if `resume` is set; otherwise raise UsageError if `run` holds states, which a new run
        would mix with its own."""
        if self.settings.resume:
            self.resume()
        else:
            self.processes.on_main(lambda: refuse_states(self.states))
        self.first = self.done

    def state_dict(self) -> dict[str, Any]:
        """Return all that the run depends on; the order of the data follows from `done`. All processes call this."""
        read, broken = (sum(self.processes.counts(n)) for n in (self.loader.read, self.loader.broken))
        return {
            "done": self.done, "settings": self.settings.flat(), **self.state.state_dict(),
            "counters": {"read": read, "broken": broken, "not_finite": self.not_finite, "in_row": self.in_row,
                         "evaluated": self.evaluated},
            "random": random_state(), "meaning": self.meaning, "epoch": self.loader.epoch,
        }  # fmt: skip

    def _load_counters(self, state: dict[str, Any]) -> None:
        counters = state["counters"]
        if self.rank == 0:  # the others start at 0, so that the sums are right
            self.loader.read, self.loader.broken = counters["read"], counters["broken"]
        self.loader.epoch = state["epoch"]
        self.not_finite, self.in_row = counters["not_finite"], counters["in_row"]
        self.evaluated, self.done, self.saved = counters["evaluated"], state["done"], state["done"]
        set_random_state(state["random"])

    def _restore(self, path: Path, state: dict[str, Any]) -> None:
        from_record(StateRecord, state, str(path / "state.pt"), others=True)
        check_meaning(state["meaning"], self.meaning)
        demand("steps", last := self.settings.steps, state["done"] <= last, f"that of {path.name} or more")
        if (path / SHARDS).is_dir():
            load_shards(path, state, self.state, self.processes)
        elif self.settings.shard:
            raise ValueError("it was saved without shard")
        else:
            self.state.load_state_dict(state)
        self._load_counters(state)

    def save(self) -> None:
        """Save the state. If it cannot be written, training continues, and the run fails if it ends so."""
        if self.saved == self.done:
            return
        self.read_metrics()
        with self._announced("saving"):
            error = self.processes.tell(self._save())
        if error:
            self.unsaved = TrainingError(error)
            log.error("%s; training continues, and earlier states stay", error)
        else:
            self.saved, self.unsaved = self.done, None

    def _save(self) -> str:
        """Return the cause of a failed save, else an empty text."""
        state, keep = self.state_dict(), self.settings.keep
        try:
            if self.settings.shard:
                save_shards(self.states, self.done, state, self.state.tensors(), self.processes, keep)
            elif self.processes.main:
                save_state(self.states, self.done, state, keep)
        except TrainingError as error:
            return str(error)
        return ""

    def resume(self) -> None:
        """Load the newest state, if any. Raises CheckpointError, in all processes, if none can be read or fits."""
        place = self.processes.on_main(lambda: newest_state(self.states))
        name = self.processes.tell(place[0].name if place else "")
        if not name:
            return log.info("--resume: no state in %s, starting a new run", self.states)
        error, path = None, self.states / name
        try:
            state = place[1] if place else read_state(path)
            self._restore(path, state)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as cause:
            error = CheckpointError(f"{path}: does not fit this run: {one_line(cause, 300)}")
        except CheckpointError as cause:
            error = cause
        self.processes.agree(error)
        log.info("resumed after step %d%s", self.done, self.settings.changes(state["settings"]))
