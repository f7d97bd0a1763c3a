"""What is measured: a case is one piece of work, done by several candidates on the same input."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "multimodal"


@dataclass(frozen=True)
class Options:
    """What the command asks of every job. `tiny`: the smallest sizes, to see that it runs."""

    device: str = "cpu"
    data: Path | None = None
    tiny: bool = False
    nanogpt: Path | None = None


@dataclass(frozen=True, eq=False)  # each is a key of its own
class Candidate:
    """One library's way to do a case's work.

    `load` is "module:function"; in a process of its own it is called with (folder, device, **settings), `folder`
    holding what `Case.prepare` wrote, and returns what does the work once and answers its output: an array, a tensor,
    or lists of numbers. It need not wait for the device: the worker does. Nothing but `benchmarks` and what the
    library itself needs may be imported there, so that a peer can live in an environment of its own.

    `kind` is the arithmetic ("float32", "bfloat16", "int8"): like is compared with like. `floor`: no peer, but what a
    part that all share takes alone.
    `command`, instead of `load`, is a process from its cold start; {python} and {folder} are filled in. `prints` is
    what its output must hold.
    """

    name: str
    load: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    library: str = OURS
    kind: str = "float32"
    command: tuple[str, ...] = ()
    prints: str = ""
    floor: bool = False

    @property
    def ours(self) -> bool:
        return self.library == OURS


@dataclass(frozen=True)
class Case:
    """`name` says what and how large. One run does `units` of `unit`.

    `prepare` ("module:function") is called with (folder, device, **settings) in a process of its own, and writes
    weights and inputs. `checks`: for each kind the check of `suite.check` and its limit, against the output of the
    candidate `reference`; a kind without one is not compared. `operations` (multiply-adds × 2) and `bytes` (read and
    written at least) of a run, where known, give the roofline. `series` and `at` place it on a curve of growing work.
    """

    job: str
    name: str
    unit: str
    units: float
    candidates: tuple[Candidate, ...]
    reference: str = ""
    checks: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    prepare: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    operations: float | None = None
    bytes: float | None = None
    series: str = ""
    at: float | None = None
    threads: tuple[int, ...] | None = None  # instead of the command's
    rounds: int | None = None  # at most
