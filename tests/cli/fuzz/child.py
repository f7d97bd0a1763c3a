"""Run one command in a forked child under limits and list its breaches."""

import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tests.cli.badinput.rows import listing

from .seeds import renew_thread_pool

CPU = 20  # seconds
WALL = 120  # seconds; others may hold the machine
ROOM = 3 << 30  # bytes of address space beyond the parent's
BEFORE_MAIN = 125
OURS = re.compile(r"multimodal( [a-z-]+)*: ")
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")


@dataclass
class Case:
    """`command`: words after `multimodal`, or a function; its files are in the working folder. `bad`: the mutated
    file, for shrinking; `finish` makes the folder fit a changed one, such as a manifest. `most`: error lines.
    `good`: what the output must hold, given stdout; returns what is wrong or ""."""

    command: list[str] | Callable[[], object]
    bad: Path | None = None
    most: int = 1
    good: Callable[[str], str] | None = None
    finish: Callable[[], object] | None = None
    logs: bool = False  # a training run's own lines on stderr are no breach
    allowed: list[str] = field(default_factory=list)


@dataclass
class Ended:
    """Outcome of the child."""

    status: int
    seconds: float  # of the processor
    late: bool
    left: bool
    out: str
    err: str


class Place:
    """`work/` with `out/`, and `outside/` beside it, fresh for each input; `work/` is the current folder."""

    def __init__(self, root: Path):
        self.root, self.work = root / "case", root / "case" / "work"
        self.streams = root / "streams"
        self.streams.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        (self.work / "out").mkdir(parents=True)
        (self.root / "outside").mkdir()
        (self.root / "outside" / "secret.txt").write_text("not yours")
        os.chdir(self.work)


def problems(case: Case, place: Place) -> tuple[list[str], Ended]:
    """Each breach of the property as a line; the working folder is the process's own."""
    allowed = ["work/out", *(f"work/{name}" for name in case.allowed)]
    before = listing(place.root, allowed)
    ended = run(case.command, place)
    return [*_of_the_end(ended), *_of_the_lines(case, ended), *_of_the_files(before, listing(place.root, allowed)),
            *_of_the_neighbour(case, ended)], ended  # fmt: skip


def _of_the_end(ended: Ended) -> list[str]:
    found = []
    if ended.late:
        found.append("waits: killed after the wall time")
    elif os.WIFSIGNALED(ended.status):
        number = os.WTERMSIG(ended.status)
        name = signal.Signals(number).name
        found.append(
            "hangs: over the processor time" if number in (signal.SIGXCPU, signal.SIGKILL) else f"dies: {name}"
        )
    elif os.WEXITSTATUS(ended.status) not in (0, 1, 2):
        found.append(f"exit code {os.WEXITSTATUS(ended.status)}")
    if ended.left:
        found.append("left a process behind")
    return found


def _of_the_lines(case: Case, ended: Ended) -> list[str]:
    lines, found = ended.err.splitlines(), []
    if "Traceback" in ended.err + ended.out:
        return [f"traceback: {lines[-1][:200] if lines else ''}"]
    code = os.WEXITSTATUS(ended.status) if os.WIFEXITED(ended.status) else None
    errors = [line for line in lines if OURS.match(line) and "error: " in line[:60]]
    if not case.logs and (strange := [line for line in lines if not OURS.match(line) and not line.startswith("\r")]):
        found.append(f"line of another hand: {strange[0][:200]}")
    if len(errors) > case.most:
        found.append(f"{len(errors)} error lines for {case.most}")
    if code in (1, 2) and not errors and "broken" not in ended.out:
        found.append("fails without a word")
    if code == 0 and errors:
        found.append("an error and exit code 0")
    if memory := [line for line in errors if "error: not enough memory" in line]:
        found.append(f"memory of no named file: {memory[0][:200]}")
    return found


def _of_the_files(before: dict, after: dict) -> list[str]:
    found = []
    for what, names in (("appeared", after.keys() - before.keys()), ("gone", before.keys() - after.keys()),
                        ("changed", {n for n in before.keys() & after.keys() if before[n] != after[n]})):  # fmt: skip
        found += [f"file {what}: {name[:100]}" for name in sorted(names)[:3]]
    return found


def _of_the_neighbour(case: Case, ended: Ended) -> list[str]:
    if case.good is None or ended.late or os.WIFSIGNALED(ended.status):
        return []
    wrong = case.good(ended.out)
    return [f"good neighbour: {wrong}"] if wrong else []


def run(command: list[str] | Callable[[], object], place: Place) -> Ended:
    streams = [place.streams / "stdout", place.streams / "stderr"]
    sys.stdout.flush()
    sys.stderr.flush()
    if (child := os.fork()) == 0:
        _child(command, place, streams)
    status, late, seconds = _wait(child, time.monotonic() + WALL)
    left = _left(child)
    out, err = (path.read_bytes().decode("utf-8", "replace") for path in streams)
    return Ended(status, seconds, late, left, out, err)


def _wait(child: int, until: float) -> tuple[int, bool, float]:
    pause, late = 0.002, False
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            return status, late, used.ru_utime + used.ru_stime
        if time.monotonic() > until and not late:
            late = True
            os.killpg(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 1.3, 0.05)


def _left(group: int) -> bool:
    """Return True if a process of the child's group outlives it by a second; end it."""
    for _ in range(10):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    return True


def _child(command: list[str] | Callable[[], object], place: Place, streams: list[Path]) -> NoReturn:
    code = BEFORE_MAIN
    try:
        os.setsid()
        os.chdir(place.work)
        for number, path in enumerate([Path(os.devnull), *streams]):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        renew_thread_pool()
        _limit()
        _watch()
        code = _main(command)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _main(command: list[str] | Callable[[], object]) -> int:
    import warnings

    from multimodal.cli import main, output
    from multimodal.errors import MultimodalError
    from tests.cli.badinput.rows import QUIET

    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, encoding="utf-8") for n, mode in enumerate("rww"))
    warnings.resetwarnings()
    for category in QUIET:
        warnings.simplefilter("ignore", category)
    try:
        if callable(command):
            command()
        else:
            main.main(command)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except MultimodalError as error:  # of a function; main prints its own
        return output.fail(error)
    return 0


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 2))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))


def _watch() -> None:
    """Report a started program or a connection as a breach, and refuse it."""

    def hook(event: str, arguments: tuple) -> None:
        network = event == "socket.connect" and isinstance(arguments[1], tuple)
        if network or event == "socket.getaddrinfo" or event.startswith(STARTS):
            os.write(2, f"reaches out: {event} {str(arguments)[:150]}\n".encode())
            raise RuntimeError(f"reaches out: {event}")

    sys.addaudithook(hook)
