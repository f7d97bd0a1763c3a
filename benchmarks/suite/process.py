"""Processes of candidates, each stopped (SIGSTOP) while another has its turn, so that idle threads do not spin."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import Candidate
from multimodal.system.signals import at_stop

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 3600  # seconds of one answer, after which a candidate is killed
LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class LostError(Exception):
    """A candidate is missing, failed or died."""


def environment(threads: int) -> dict[str, str]:
    """Environment of every process: thread limits, no model hub, no fork warnings of tokenizers. Bytecode is written,
    or each cold start would compile ours but no installed peer."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return own | {name: str(threads) for name in LIMITS} | fixed


def processors(threads: int) -> set[int]:
    """The last ones available: the first ones serve most interrupts."""
    return set(sorted(os.sched_getaffinity(0))[-threads:])


def pin(pid: int, threads: int) -> None:
    """Pin all threads of a process; new threads inherit it. On Linux only."""
    tasks = Path(f"/proc/{pid}/task")
    for task in [int(entry.name) for entry in tasks.iterdir()] if tasks.exists() else []:
        with contextlib.suppress(OSError):  # it may have ended
            os.sched_setaffinity(task, processors(threads))


class Worker:
    """A candidate in its process. `ask` resumes it, waits for its answer and stops it again."""

    def __init__(self, made: Candidate, folder: Path, device: str, threads: int, python: str = sys.executable):
        self.made, self.threads = made, threads
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        spec = {"load": made.load, "settings": dict(made.settings), "library": made.library, "device": device,
                "folder": str(folder)}  # fmt: skip
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.suite.worker", json.dumps(spec)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, text=True, env=environment(threads), cwd=ROOT,
        )  # fmt: skip
        self.stopped = at_stop(self.process.kill)  # a stopped process would survive
        self.stopped.__enter__()

    def answer(self) -> dict[str, Any]:
        limit = threading.Timer(LONGEST, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line:
            self.process.wait(LONGEST)
            self.log.seek(0)
            lines = [text.strip() for text in self.log.read().splitlines() if text.strip()]
            raise LostError(
                f"ended with exit code {self.process.returncode}: {lines[-1] if lines else 'no output'}"[:300]
            )
        found = json.loads(line)
        for why in ("missing", "failed"):
            if why in found:
                raise LostError(f"{why}: {found[why]}")
        return found

    def ready(self) -> dict[str, Any]:
        """Wait until loaded; loading may use all processors, the rest only `threads`."""
        found = self.answer()
        pin(self.process.pid, self.threads)
        self.process.send_signal(signal.SIGSTOP)
        return found

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            print(json.dumps(order), file=self.process.stdin, flush=True)
        found = self.answer()
        self.process.send_signal(signal.SIGSTOP)
        return found

    def end(self) -> None:
        self.stopped.__exit__(None, None, None)
        self.process.kill()
        self.process.wait(LONGEST)
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


# a child's peak resident size starts from its parent's: use a small parent
LAUNCH = """import json, os, subprocess, sys, time
start = time.perf_counter()
child = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(child.pid, 0)
wall = time.perf_counter() - start
found = {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss}
with open(sys.argv[1], "w") as file:
    json.dump(found | {"code": os.waitstatus_to_exitcode(status)}, file)
"""


def cold(made: Candidate, folder: Path, threads: int, python: str = sys.executable) -> tuple[dict[str, float], str]:
    """Run a whole process; return its figures and output."""
    command = [part.format(python=python, folder=folder) for part in made.command]
    temporary = tempfile.TemporaryFile
    with tempfile.TemporaryDirectory() as place, temporary("w+") as out, temporary("w+") as log:
        figures = Path(place) / "figures.json"
        launcher = subprocess.Popen(
            [sys.executable, "-S", "-c", LAUNCH, str(figures), *command], stdin=subprocess.DEVNULL, stdout=out,
            stderr=log, env=environment(threads), cwd=folder,
        )  # fmt: skip
        pin(launcher.pid, threads)
        launcher.wait(LONGEST)
        out.seek(0)
        log.seek(0)
        found = json.loads(figures.read_text()) if figures.exists() else {"code": launcher.returncode}
        if found["code"]:
            lines = log.read().strip().splitlines()
            raise LostError(f"ended with exit code {found['code']}: {lines[-1] if lines else 'no output'}"[:300])
        peak = found["peak"] / (1024 * 1024 if sys.platform == "darwin" else 1024)
        return {"wall": found["wall"], "cpu": found["cpu"], "peak MB": peak}, out.read()


def prepare(load: str, settings: Mapping[str, Any], folder: Path, device: str) -> None:
    """Run a case's `prepare` with all threads."""
    program = ("import json, sys; from pathlib import Path; from benchmarks.suite.worker import function; "
               "function(sys.argv[1])(Path(sys.argv[2]), sys.argv[3], **json.loads(sys.argv[4]))")  # fmt: skip
    command = [sys.executable, "-c", program, load, str(folder), device, json.dumps(dict(settings))]
    done = subprocess.run(
        command, env=environment(os.cpu_count() or 1), cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise LostError(f"its preparation ended with exit code {done.returncode}: {lines[-1] if lines else ''}"[:300])
