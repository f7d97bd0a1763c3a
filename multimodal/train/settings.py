"""How long, how and where a run trains: the flags that all recipes share."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from multimodal.errors import demand
from multimodal.train.device import check_device
from multimodal.train.optim import OptimSettings


@dataclass(frozen=True)
class LoopSettings:
    """Raises UsageError for a value out of its range, or one that this machine cannot run."""

    run: Path  # folder of the states, the metrics and the report
    steps: int
    optim: OptimSettings = field(default_factory=OptimSettings)
    accumulate: int = 1  # micro-batches a step
    precision: Literal["float32", "autocast", "bfloat16", "float16"] = "autocast"  # autocast: bfloat16 beside float32
    compile: bool = False  # compile the blocks
    checkpointing: bool = False  # compute activations again in backward: less memory, more time
    device: str = "cpu"
    shard: bool = False  # weights and optimizer in parts over the processes (FSDP2), for models too large for one GPU
    threads: int = 0  # 0: torch's own choice
    workers: int = 0  # processes that make batches; 0: this one
    seed: int = 0
    log_every: int = 50  # steps
    save_every: int = 500  # steps
    evaluate_every: int = 500  # steps
    keep: int = 2  # newest states that are kept
    most_not_finite: int = 10  # steps in a row without a finite loss and gradient, after which the run ends
    resume: bool = False  # go on from the newest state in --run, or begin where there is none

    def __post_init__(self):
        for name in ("steps", "accumulate", "log_every", "save_every", "evaluate_every", "most_not_finite"):
            demand(name, getattr(self, name), getattr(self, name) >= 1, "1 or more")
        for name in ("threads", "workers", "seed"):
            demand(name, getattr(self, name), getattr(self, name) >= 0, "0 or more")
        demand("threads", self.threads, self.threads <= 1024, "1024 or fewer")  # torch starts them all
        demand("keep", self.keep, self.keep >= 2, "2 or more, so that one is left when the newest is damaged")
        if self.shard:  # Muon needs whole matrices, the scale of float16 what all processes found
            demand("optimizer", self.optim.optimizer, self.optim.optimizer == "adamw", "adamw with --shard")
            demand("precision", self.precision, self.precision != "float16", "autocast or bfloat16 with --shard")
        check_device(self.device, self.precision, self.compile)

    def flat(self) -> dict[str, Any]:
        """What shapes the run, named as its flags."""
        values = dataclasses.asdict(self)
        for name in ("run", "resume"):
            del values[name]
        return values.pop("optim") | values
