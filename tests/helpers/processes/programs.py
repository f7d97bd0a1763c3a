"""Child programs of tests, with a time limit; none outlives its test."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LIMIT = 120  # seconds: a starved machine is slow, a hang is longer


@contextlib.contextmanager
def started(command: Sequence[Any], limit: float = LIMIT, **options: Any) -> Iterator[subprocess.Popen]:
    """Start a program in its own process group and kill the group at the end, or after `limit` seconds, which ends
    a `readline` that waits for its output."""
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
