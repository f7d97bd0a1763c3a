"""Signals that ask a run to stop: the step is finished, the state saved, and the program ends with code 75."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run again with --resume
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(BaseException):  # no Exception, so that a recipe's own `except Exception` lets it through
    """The run was asked to stop, and its state is saved."""


class Stop:
    """While entered, `asked` names the first signal that came; later ones change nothing, so that they cannot break
    the save. Only the main thread can be told; elsewhere no signal is taken over."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._waiting = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._before = {}

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Around what may be left at any moment, such as an evaluation: Stopped is raised there at once."""
        self._waiting = True
        try:
            if self.asked:
                raise Stopped(self.asked)
            yield
        finally:
            self._waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = self.asked is None, self.asked or signal.Signals(number).name
        if first and self._waiting:
            raise Stopped(self.asked)


def calm_worker(_: int = 0) -> None:
    """A loader's worker outlives a signal sent to all processes of a run, since the run still needs its batches; a
    second SIGTERM, which is how the loader ends a worker that hangs, ends it."""
    seen: list[int] = []

    def second(number: int, frame: FrameType | None) -> None:
        if seen:
            os._exit(0)
        seen.append(number)

    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, second)
