"""Measurement of one case: load the candidates, compare their outputs, then time them in turns."""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite import check, process
from benchmarks.suite.cases import Candidate, Case

YARDSTICK = Candidate("yardstick", "benchmarks.suite.machine:yardstick", library="numpy")
LEAST = 0.1  # seconds of a turn: shorter work is repeated
LONG = 5.0  # seconds of a first run that needs no warm-up, and counts for a case of one round


@dataclass(frozen=True)
class Plan:
    """Measurement settings of a case. `seconds`: limit of its rounds. `longest`: limit of one run; a candidate that
    would exceed it at the next point of a curve is skipped there."""

    device: str
    rounds: int
    seconds: float
    longest: float
    pythons: Mapping[str, str]  # library → interpreter of its own environment

    def python(self, made: Candidate) -> str:
        return self.pythons.get(made.library, sys.executable)


Turn = Callable[[], dict[str, float]]


class Measurement:
    """The row of one case at one number of threads, as JSON."""

    def __init__(self, case: Case, threads: int, plan: Plan, say: Callable[[str], None]):
        self.case, self.threads, self.plan, self.say = case, threads, plan, say
        self.row: dict[str, Any] = {
            "case": case.name, "threads": threads, "unit": case.unit, "units": case.units, "candidates": {},
            "wrong": [],
        }  # fmt: skip
        for name in ("operations", "bytes", "series", "at"):
            if getattr(case, name):
                self.row[name] = getattr(case, name)

    def enter(self, made: Candidate, facts: Mapping[str, Any] | None = None) -> None:
        self.row["candidates"][made.name] = {"kind": made.kind, "library": made.library, **(facts or {})}

    def lose(self, made: Candidate, why: str, wrong: bool) -> None:
        """Record a lost candidate: an error if it is ours or its output is wrong; peers may be missing."""
        self.enter(made, {"left out": why})
        if wrong or made.ours:
            self.row["wrong"].append(f"{made.name}: {why}")
        self.say(f"  {made.name}: {why}")

    def run(self, folder: Path, left_out: Mapping[str, str]) -> dict[str, Any]:
        """`folder`: files of `prepare`."""
        for made in self.case.candidates:
            if made.name in left_out:
                self.enter(made, {"left out": left_out[made.name]})
        chosen = [made for made in self.case.candidates if made.name not in left_out]
        workers: dict[Candidate, process.Worker] = {}
        try:
            if any(made.command for made in chosen):
                turns = self.cold(chosen, folder)
            else:
                workers = {made: self.worker(made, folder) for made in chosen}
                turns = self.checked(workers, folder)
            if turns:
                self.rounds(turns)
        except process.LostError as error:
            self.row["wrong"].append(str(error))
            self.say(f"  {error}")
        finally:
            for worker in workers.values():
                worker.end()
        return self.row

    def worker(self, made: Candidate, folder: Path) -> process.Worker:
        return process.Worker(made, folder, self.plan.device, self.threads, self.plan.python(made))

    def cold(self, chosen: list[Candidate], folder: Path) -> dict[Candidate, Turn]:
        """Turns of whole processes; the first run fills the disk cache and must print what is expected."""
        turns: dict[Candidate, Turn] = {}
        for made in chosen:

            def turn(made: Candidate = made) -> dict[str, float]:
                return process.cold(made, folder, self.threads, self.plan.python(made))[0]

            try:
                _, printed = process.cold(made, folder, self.threads, self.plan.python(made))
            except process.LostError as error:
                self.lose(made, str(error), wrong=False)
                continue
            if made.prints not in printed:
                self.lose(made, f"did not print {made.prints!r}", wrong=True)
                continue
            self.enter(made)
            turns[made] = turn
        return turns

    def checked(self, workers: dict[Candidate, process.Worker], folder: Path) -> dict[Candidate, Turn]:
        """Turns of the candidates whose first output matches the reference."""
        outputs: dict[str, Any] = {}
        ready: dict[Candidate, process.Worker] = {}
        first: dict[Candidate, dict[str, float]] = {}
        for made, worker in workers.items():
            try:
                self.enter(made, {name: value for name, value in worker.ready().items() if value is not None})
                to = folder / f"output-{len(outputs)}"
                first[made] = worker.ask({"do": "output", "to": str(to)})
                outputs[made.name], ready[made] = check.read(to), worker
            except process.LostError as error:
                self.lose(made, str(error), wrong=False)
        if not self.case.checks or all(made.name != self.case.reference for made in workers):  # it was too slow
            return {made: self.turn(worker, first[made]) for made, worker in ready.items()}
        if self.case.reference not in outputs:
            raise process.LostError(f"the reference, {self.case.reference}, gave no output: nothing was measured")
        turns = {}
        for made, worker in ready.items():
            if made.kind in self.case.checks and made.name != self.case.reference:
                name, limit = self.case.checks[made.kind]
                distance, why = check.compare(outputs[made.name], outputs[self.case.reference], name, limit)
                self.row["candidates"][made.name]["distance"] = {name: float(f"{distance:.2e}")}
                if why:
                    self.lose(made, why, wrong=True)
                    continue
            turns[made] = self.turn(worker, first[made])
        return turns

    def turn(self, worker: process.Worker, first: dict[str, float]) -> Turn:
        """`first`: figures of its first run."""
        if self.case.rounds == 1 and first["wall"] > LONG:
            return lambda: first
        once = first["wall"] if first["wall"] > LONG else worker.ask({"do": "run", "repeats": 1})["wall"]  # warm by now
        repeats = max(1, min(1000, round(LEAST / max(once, 1e-6))))
        return lambda: worker.ask({"do": "run", "repeats": repeats})

    def rounds(self, turns: dict[Candidate, Turn]) -> None:
        """Run the rounds, rotating the order by one each time."""
        taken: dict[Candidate, list[dict[str, float]]] = {made: [] for made in turns}
        noise: list[float] = []
        most = min(self.plan.rounds, self.case.rounds or self.plan.rounds)
        yardstick = self.worker(YARDSTICK, Path())
        try:
            yardstick.ready()
            begin, order = time.perf_counter(), list(turns)
            for number in range(most):
                noise.append(yardstick.ask({"do": "run", "repeats": 1})["wall"])
                for made in order[number % len(order) :] + order[: number % len(order)]:
                    taken[made].append(turns[made]())
                gone = time.perf_counter() - begin
                if gone * (number + 2) / (number + 1) > self.plan.seconds:
                    break
        finally:
            yardstick.end()
        self.row["rounds"] = len(noise)
        self.row["noise"] = spread(noise)
        for made, runs in taken.items():
            self.row["candidates"][made.name] |= figures(runs, self.case.units)
        self.row["ratios"] = ratios(taken)


def spread(times: list[float]) -> dict[str, float]:
    """Noise of constant work: median deviation and slowest, relative to the median. Empty for one round."""
    if len(times) < 2:
        return {}
    middle = statistics.median(times)
    return {"median deviation": round(statistics.median(abs(t - middle) for t in times) / middle, 4),
            "slowest": round(max(times) / middle, 3)}  # fmt: skip


def figures(runs: list[dict[str, float]], units: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        times = [run[clock] for run in runs]
        found[clock] = {"median": _round(statistics.median(times)), "least": _round(min(times)),
                        "all": [_round(t) for t in times]}  # fmt: skip
    found["units a second"] = _round(units / statistics.median(run["wall"] for run in runs))
    for name in ("peak MB", "peak device MB"):
        if runs[-1].get(name) is not None:
            found[name] = round(max(run[name] for run in runs), 1)
    return found


def ratios(taken: dict[Candidate, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Time of each peer divided by ours (above 1: ours is faster): wall clock by round and its median, of the minima,
    and CPU time."""
    found = []
    for own, peer in itertools.product(taken, taken):
        if not own.ours or peer.ours:
            continue
        pairs = list(zip(taken[own], taken[peer], strict=True))
        wall, cpu = ([b[clock] / max(a[clock], 1e-9) for a, b in pairs] for clock in ("wall", "cpu"))
        least = min(b["wall"] for _, b in pairs) / min(a["wall"] for a, _ in pairs)
        found.append({
            "ours": own.name, "peer": peer.name, "kind": own.kind, "peer kind": peer.kind, "floor": peer.floor,
            "median": round(statistics.median(wall), 3), "least": round(least, 3),
            "cpu": round(statistics.median(cpu), 3), "rounds": [round(r, 3) for r in wall],
        })  # fmt: skip
    return found


def _round(value: float) -> float:
    return float(f"{value:.4g}")
