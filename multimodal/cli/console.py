"""Messages on stderr: the present step, notes, progress."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from multimodal.cli.output import printable
from multimodal.system.files import say

BEGAN = time.monotonic()
WIDTH = 79


class Console:
    """Messages of a command. `quiet`: warnings and errors alone. `verbose`: each step is a line with its time, also
    where stderr is no terminal, and an error has its traceback."""

    def __init__(self) -> None:
        self.quiet = self.verbose = self.pending = False
        self.output = ""  # where the command writes
        self.stream = sys.stderr

    def terminal(self) -> bool:
        """Return True if progress is to be shown."""
        return not self.quiet and sys.stderr is not None and sys.stderr.isatty()

    def step(self, text: str) -> None:
        """Show what is being done, until anything else is written."""
        if self.verbose:
            say(f"multimodal: {time.monotonic() - BEGAN:.1f} s: {printable(text)}")
        elif self.terminal():
            say(f"\r\x1b[K{printable(text)[:WIDTH]}", end="")
            self.pending = True

    def note(self, text: str) -> None:
        """A line, unless `quiet`."""
        if not self.quiet:
            say(f"multimodal: {printable(text)}")

    def clear(self) -> None:
        """End the present line."""
        if self.pending:
            self.pending = False
            with suppress(OSError):  # as `say` does
                self.stream.write("\r\x1b[K")
                self.stream.flush()

    @contextmanager
    def shown(self, quiet: bool, verbose: bool) -> Iterator[None]:
        """Set both for the command that runs in this block. What it writes ends a line of `step` or `Progress`."""
        self.quiet, self.verbose = quiet, verbose
        streams = _, self.stream = sys.stdout, sys.stderr
        try:
            if self.terminal():
                sys.stderr = _Clearing(sys.stderr, self)
                if sys.stdout is not None and sys.stdout.isatty():
                    sys.stdout = _Clearing(sys.stdout, self)
            yield
        finally:
            self.clear()
            sys.stdout, sys.stderr = streams
            self.quiet = self.verbose = False


class _Clearing:
    """A stream; whoever uses it ends the present line."""

    def __init__(self, stream: Any, console: Console):
        self._stream, self._console = stream, console

    def __getattr__(self, name: str) -> Any:
        if name not in ("isatty", "fileno", "encoding"):
            self._console.clear()
        return getattr(self._stream, name)


console = Console()


class Progress:
    """A line on a terminal's stderr, twice a second, until anything else is written: items done, rate, time left."""

    def __init__(self, name: str):
        self.name, self.on, self.shown, self.began = printable(name), console.terminal(), 0.0, time.monotonic()

    def __call__(self, done: int, items: int, broken: int | None = None) -> None:
        now = time.monotonic()
        if not self.on or (self.shown and now - self.shown < 0.5):
            return
        faults = f", {broken} broken" if broken is not None else ""
        rate = done / max(now - self.began, 1e-6)
        speed = f", {rate:.3g}/s, {clock((items - done) / rate)} left" if 0 < done < items else ""
        say(f"\r{self.name}: {done} of {items}{faults}{speed}\x1b[K", end="")
        self.shown, console.pending = now, True


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, such as 2:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
