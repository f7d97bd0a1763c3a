"""Child programs of tests, with a time limit; none outlives its test."""

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LIMIT = 120  # seconds: a starved machine is slow, a hang is longer


@contextlib.contextmanager
def started(command: Sequence[Any], limit: float = LIMIT, **options: Any) -> Iterator[subprocess.Popen]:
    """Start a program in its own process group and kill the group at the end, or after `limit` seconds, which ends
    a `readline` that waits for its output."""
    with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of forks beside threads
        program = subprocess.Popen(command, start_new_session=True, **options)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)

    timer = threading.Timer(limit, kill)
    timer.daemon = True
    timer.start()
    try:
        yield program
    finally:
        timer.cancel()
        kill()
        program.wait(limit)
        for stream in (program.stdin, program.stdout, program.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


def forked(
    program: str, *arguments: object, env: Mapping[str, str] | None = None, limit: float = LIMIT, **options: Any
) -> AbstractContextManager[subprocess.Popen]:
    """Start `python -c PROGRAM ARGUMENTS` as a fork of this process, which has imported what takes seconds; stdout and
    stderr are pipes of text.

    `env`: variables beside those of this process. What a start or the interpreter's end does needs a new process; so
    does training, since autograd may have threads here."""

    def run() -> NoReturn:
        os.closerange(3, 256)  # also the pipe by which Popen waits for a program of another name
        _run(program, [str(argument) for argument in arguments], env or {})

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return started([sys.executable], limit, preexec_fn=run, **pipes | options)


def _run(program: str, arguments: list[str], env: Mapping[str, str]) -> NoReturn:
    code = 1
    try:
        gc.freeze()
        os.environ.update(env)
        sys.argv = ["-c", *arguments]
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, encoding="utf-8") for n, mode in enumerate("rww"))
        logging.getLogger().handlers.clear()
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def wait_for(condition: Callable[[], Any], limit: float = LIMIT) -> None:
    """Wait until `condition()` holds."""
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, f"not within {limit} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
