"""Signals that ask a run to stop: the step is finished, the state saved, and the program ends with code 75."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from multimodal.signals import handled

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run again with --resume
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PARENT = 0.5  # seconds between two looks whether a worker's parent lives


class Stopped(BaseException):  # no Exception, so that a recipe's own `except Exception` lets it through
    """The run was asked to stop, and its state is saved."""


class Stop:
    """While entered, `asked` names the first signal that came; later ones change nothing, so that they cannot break
    the save. Whoever waits calls `check` at least every second. Only the main thread can take signals over."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._handled = contextlib.ExitStack()

    def __enter__(self) -> "Stop":
        self._handled.enter_context(handled(SIGNALS, self._note))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handled.close()
        if self.asked and kind is None:  # it came after the last check
            signal.raise_signal(signal.Signals[self.asked])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name

    def check(self) -> None:
        """Raise Stopped after a signal."""
        if self.asked:
            raise Stopped(self.asked)

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Call `check` before each forward of any module in the block, such as an evaluation's batches."""

        def look(*_: object) -> None:
            if not torch.compiler.is_compiling():
                self.check()

        self.check()
        hook = register_module_forward_pre_hook(look)
        try:
            yield
        finally:
            hook.remove()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Keep signals waiting: also for a worker forked in the block, up to its `calm_worker`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def calm_worker(_: int = 0) -> None:
    """Have a loader's worker outlive signals sent to all processes of a run, which still needs its batches. The run
    ends it with SIGKILL."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()


def end_with_parent() -> None:
    """End this process soon after its parent, also where that was killed."""
    signal.set_wakeup_fd(-1)  # a forked worker has its parent's
    parent = multiprocessing.parent_process().pid

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT)
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="parent").start()
