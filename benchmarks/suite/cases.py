"""Cases and candidates: a case is one piece of work, done by several candidates on the same input."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = "multimodal"


@dataclass(frozen=True)
class Options:
    """Options of every job. `tiny`: the smallest sizes, as a smoke test."""

    device: str = "cpu"
    data: Path | None = None
    tiny: bool = False
    nanogpt: Path | None = None


@dataclass(frozen=True, eq=False)  # each is a key of its own
class Candidate:
    """One library's implementation of a case.

    `load` is "module:function", called in a process of its own with (folder, device, **settings), where `folder` has
    the files of `Case.prepare`. It returns a function that does the work once and returns its output: an array, a
    tensor or lists of numbers. The worker waits for the device. The module may import only `benchmarks` and what the
    library needs, so that a peer can have an environment of its own.

    `kind` is the arithmetic ("float32", "bfloat16", "int8"); equal kinds are compared. `floor`: not a peer, but the
    time of a shared part alone. `command`, instead of `load`, is a process measured from its cold start; {python} and
    {folder} are filled in, and its output must contain `prints`."""

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


def in_kinds(
    name: str, load: str, settings: Mapping[str, Any], library: str = OURS,
    kinds: Iterable[str] = ("float32", "bfloat16"), suffix: str = "",
) -> tuple[Candidate, ...]:  # fmt: skip
    """One candidate per kind of arithmetic, which is in its name and its settings."""
    return tuple(Candidate(f"{name} {kind}{suffix}", load, {**settings, "kind": kind}, library, kind) for kind in kinds)


@dataclass(frozen=True)
class Case:
    """One run does `units` of `unit`.

    `prepare` ("module:function") is called with (folder, device, **settings) in a process of its own and writes weights
    and inputs. `checks`: for each kind a check of `suite.check` and its limit, against the output of the candidate
    `reference`; other kinds are not compared. `operations` (multiply-adds × 2) and minimal `bytes` of a run give the
    roofline. `series` and `at`: a point on a growth curve.
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
