"""Settings of the training loop, shared by all recipes as flags."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from multimodal.data.loader import Loader, Plan, Source
from multimodal.errors import demand
from multimodal.inference.prepare import prefers_bfloat16
from multimodal.system.options import Limits, Natural, Positive, check_limits
from multimodal.train.device import check_device
from multimodal.train.optim import OptimSettings


@dataclass(frozen=True)
class LoopSettings:
    """Steps, precision, device and checkpoints of a run."""

    run: Path  # folder for checkpoints, metrics and the report
    steps: Positive
    optim: OptimSettings = OptimSettings()
    accumulate: Positive = 1  # micro-batches per step
    # autocast: bfloat16 over float32; auto: autocast where bfloat16 is quicker, else float32
    precision: Literal["auto", "float32", "autocast", "bfloat16", "float16"] = "auto"
    compile: bool = False  # compile the blocks
    checkpointing: bool = False  # recompute activations in backward: less memory, more time
    device: str = "cpu"
    graphs: bool = False  # on a GPU, replay steps whose shapes recur as CUDA graphs: for small models
    deterministic: bool = False  # use deterministic kernels: runs on a GPU repeat bit for bit, but slower
    shard: bool = False  # shard weights and optimizer over processes (FSDP2), for models too large for one GPU
    hybrid: bool = False  # with shard: over the processes of each machine; machines exchange gradients alone (HSDP)
    reduce: Literal["float32", "bfloat16"] = "float32"  # with shard and autocast: type in which gradients are summed
    threads: Annotated[int, Limits(0, 1024)] = 0  # 0: torch's default; limited, since torch starts them all
    workers: Natural = 0  # processes that make batches; 0: the main process
    seed: Natural = 0
    log_every: Positive = 50  # steps
    save_every: Positive = 500  # steps
    evaluate_every: Positive = 500  # steps
    keep: Annotated[int, Limits(2)] = 2  # newest checkpoints kept: one remains if the newest is damaged
    most_not_finite: Positive = 10  # consecutive steps without a finite loss or gradient that end the run
    resume: bool = False  # continue from the newest checkpoint in --run, or start if there is none

    def __post_init__(self):
        check_limits(self)
        demand("hybrid", self.hybrid, self.shard or not self.hybrid, "with shard")
        demand("reduce", self.reduce, self.shard or self.reduce == "float32", "float32 without shard")
        if self.shard:  # Muon needs whole matrices, float16's scaler the gradients of all processes
            demand("optimizer", self.optim.optimizer, self.optim.optimizer == "adamw", "adamw with shard")
            demand("precision", self.precision, self.precision != "float16", "autocast or bfloat16 with shard")
        check_device(self.device, self.precision, self.compile)
        if self.graphs:
            demand("device", self.device, torch.device(self.device).type == "cuda", "a GPU with graphs")
            demand("precision", self.precision, self.precision != "float16", "another one with graphs")
            demand("shard", self.shard, not self.shard, "off with graphs")
            demand("checkpointing", self.checkpointing, not self.checkpointing, "off with graphs")

    @property
    def used_precision(self) -> str:
        """`precision`, of `auto` the one for `device`. Not set once: a recipe's defaults become another device's."""
        if self.precision != "auto":
            return self.precision
        fast = torch.device(self.device).type != "cpu" or prefers_bfloat16()
        return "autocast" if fast else "float32"

    def loader(
        self, source: Source, plan: Plan, prepare: Callable, collate: Callable, most_broken: float = 0.05
    ) -> Loader:
        """Batches with the seed, workers and micro-batches of this run; a GPU finishes `Deferred` ones."""
        return Loader(
            source, plan, prepare, collate, seed=self.seed, workers=self.workers, micro=self.accumulate,
            most_broken=most_broken, finish=torch.device(self.device).type == "cpu",
        )  # fmt: skip

    def flat(self) -> dict[str, Any]:
        """Return all settings that shape the run, by flag name."""
        values = dataclasses.asdict(self) | {"precision": self.used_precision}
        for name in ("run", "resume"):
            del values[name]
        return values.pop("optim") | values

    def changes(self, old: Mapping[str, Any]) -> str:
        """Name the flags that differ from `flat()` of an earlier run."""
        changed = [f"--{name} {value} (was {old.get(name)})" for name, value in self.flat().items()
                   if old.get(name) != value]  # fmt: skip
        return f", now with {', '.join(changed)}" if changed else ""
