"""`run` measures and saves results, `report` writes their table and plots, `list` names the cases."""

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suite import machine, process
from benchmarks.suite.cases import Case, Options
from benchmarks.suite.driver import Measurement, Plan
from multimodal.system.signals import at_stop, ending

GPU_THREADS = 16  # for every case on a GPU
RESULTS = Path(__file__).resolve().parents[1] / "results"
JOBS = {
    "cpu": ("import", "calls", "transcribe", "vision", "text", "ask", "train", "front", "ray", "growth", "export"),
    "cuda": ("cuda_train", "cuda_inference"),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure and save results")
    names = commands.add_parser("list", help="the cases of each job")
    report = commands.add_parser("report", help="write the table and plots of saved results")
    for each in (run, names):
        each.add_argument("--jobs", default="", help="comma-separated (default: all jobs of the device)")
        each.add_argument("--device", choices=JOBS, default="cpu")
        each.add_argument("--only", default="", help="cases whose name contains this text")
        each.add_argument("--tiny", action="store_true", help="smallest sizes, as a smoke test")
        each.add_argument("--data", type=Path, help="folder of real data, for cases that can use it")
        each.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    run.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads to measure")
    run.add_argument("--rounds", type=int, default=7)
    run.add_argument("--case_seconds", type=float, default=60.0, help="time limit of a case's rounds")
    run.add_argument("--longest", type=float, default=120.0, help="time limit of one run on a curve")
    run.add_argument("--seconds", type=float, help="time after which no more cases start")
    run.add_argument("--python", action="append", default=[], metavar="LIBRARY=PATH",
                     help="interpreter of a peer's own environment")  # fmt: skip
    for each in (run, report):
        each.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/DEVICE)")
    report.add_argument("--device", choices=JOBS, default="cpu")
    return made


def fail(message: str) -> None:
    raise SystemExit(f"python -m benchmarks: {message}")


def cases(job: str, options: Options) -> list[Case]:
    """The cases of `benchmarks.jobs.JOB_cases`."""
    return importlib.import_module(f"benchmarks.jobs.{job}_cases").cases(options)


def options(args: argparse.Namespace) -> Options:
    return Options(args.device, args.data, args.tiny, args.nanogpt)


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, list[Case]]]:
    names = args.jobs.split(",") if args.jobs else JOBS[args.device]
    for job in names:
        # tiny GPU jobs run on a CPU too, as a smoke test
        if job not in JOBS[args.device] and not (args.tiny and job in JOBS["cuda"]):
            fail(f"--jobs {job}: not a job of {args.device}: {', '.join(JOBS[args.device])}")
        left_out = {"bfloat16"} if args.device == "cpu" and not machine.multiplies_bfloat16() else set()
        yield job, [replace(case, candidates=tuple(one for one in case.candidates if one.kind not in left_out))
                    for case in cases(job, options(args)) if args.only in case.name]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            fail("--device cuda: no GPU found")
    pythons = dict(pair.split("=", 1) if "=" in pair else fail(f"--python must be LIBRARY=PATH (got {pair})")
                   for pair in args.python)  # fmt: skip
    for library, path in pythons.items():
        if not shutil.which(path):
            fail(f"--python {library}={path}: no such program")
    if min(args.threads) < 1:
        fail(f"--threads must be at least 1 (got {min(args.threads)})")
    plan = Plan(args.device, args.rounds, args.case_seconds, args.longest, pythons)
    folder = args.out or RESULTS / (f"{args.device}-tiny" if args.tiny else args.device)
    end, wrong = time.monotonic() + (args.seconds or float("inf")), []
    jobs = list(chosen(args))
    if not any(todo for _, todo in jobs):
        fail(f"--only {args.only}: no such case; see `list`")
    about = machine.describe(args.device)
    counts = [GPU_THREADS] if args.device == "cuda" else args.threads
    about["ceilings"] = {str(n): machine.ceilings(args.device, n) for n in counts}
    for job, todo in jobs:
        rows = Rows(folder / f"{job}.json", about, {case.name for case in cases(job, options(args))})
        for case in todo:
            if time.monotonic() > end:
                print(f"{case.name}: skipped after --seconds {args.seconds:g}", flush=True)
                wrong.append(case.name)
            else:
                wrong += measure(case, rows, plan, case.threads or args.threads)
    from benchmarks.suite import report

    report.write(folder)
    print(f"{folder}")
    return 1 if wrong else 0


def measure(case: Case, rows: "Rows", plan: Plan, threads: Sequence[int]) -> list[str]:
    wrong, say = [], lambda text: print(text, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, at_stop(partial(shutil.rmtree, folder)):
        try:
            if case.prepare:
                process.prepare(case.prepare, case.settings, Path(folder), plan.device)
        except process.LostError as error:
            say(f"{case.name}: {error}")
            return [str(error)]
        for count in threads:
            print(f"{case.job}: {case.name}, {count} thread{'s' * (count > 1)}", flush=True)
            row = Measurement(case, count, plan, say).run(Path(folder), rows.too_long(case, count, plan.longest))
            rows.keep(row)
            show(row)
            wrong += row["wrong"]
    return wrong


class Rows:
    """The result file of a job, written after each row. Keeps rows of other cases in `names` and other threads; each
    row has its date and commit."""

    def __init__(self, path: Path, about: dict[str, Any], names: set[str]):
        self.path, self.about = path, about
        old = json.loads(path.read_text()) if path.exists() else {"machine": about, "rows": []}
        self.about["ceilings"] = old["machine"]["ceilings"] | about["ceilings"]
        self.rows: list[dict[str, Any]] = [row for row in old["rows"] if row["case"] in names]

    def keep(self, row: dict[str, Any]) -> None:
        row |= {name: self.about[name] for name in ("date", "commit") if name in self.about}
        same = lambda other: (other["case"], other["threads"]) == (row["case"], row["threads"])
        at = next((i for i, other in enumerate(self.rows) if same(other)), len(self.rows))
        self.rows[at : at + 1] = [row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"machine": self.about, "rows": self.rows}, indent=1) + "\n")

    def too_long(self, case: Case, threads: int, longest: float) -> dict[str, str]:
        """Candidates that by the curve's last point would take more than `longest` s here, and why."""
        before = [row for row in self.rows if case.series and row.get("series") == case.series
                  and row["threads"] == threads and row["at"] < case.at]  # fmt: skip
        found = {}
        for row in before[-1:]:
            for name, figures in row["candidates"].items():
                if "left out" in figures:
                    found[name] = figures["left out"]
                    continue
                expected = figures["wall"]["median"] * case.units / row["units"]
                if expected > longest:
                    found[name] = f"would take about {expected:.0f} s"
        return found


def show(row: dict[str, Any]) -> None:
    for name, found in row["candidates"].items():
        if "wall" in found:
            speed = f"{found['units a second']:>10} {row['unit']}/s"
            print(f"  {name:<34} {1000 * found['wall']['median']:10.2f} ms {speed}  {found.get('peak MB', 0):7.0f} MB",
                  flush=True)  # fmt: skip
    for ratio in row.get("ratios", []):
        if ratio["kind"] == ratio["peer kind"] and not ratio["floor"]:
            print(f"    {ratio['ours']} is {ratio['median']} times as fast as {ratio['peer']}", flush=True)


def main() -> None:
    args = parser().parse_args()
    if args.command == "list":
        for job, todo in chosen(args):
            for case in todo:
                print(f"{job}: {case.name}: {', '.join(made.name for made in case.candidates)}")
        return
    if args.command == "report":
        from benchmarks.suite import report

        report.write(args.out or RESULTS / args.device)
        return
    with ending():
        code = run(args)
    raise SystemExit(code)
