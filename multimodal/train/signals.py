"""Graceful stop on a signal: the run finishes its step, saves its state and exits with code 75."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from multimodal.system.signals import SIGNALS, handled

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: run again with --resume


class Stopped(BaseException):  # not an Exception: must pass a recipe's `except Exception`
    """A signal stopped the run, whose state is saved."""


class StopSignal:
    """Context in which `asked` is the name of the first signal received; later ones are ignored, so that they cannot
    break the save. Code that waits calls `check` at least every second. Works in the main thread only."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._handled = contextlib.ExitStack()

    def __enter__(self) -> "StopSignal":
        self._handled.enter_context(handled(SIGNALS, self._note))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handled.close()
        if self.asked and kind is None:  # received after the last check
            signal.raise_signal(signal.Signals[self.asked])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name

    def check(self) -> None:
        """Raise Stopped after a signal."""
        if self.asked:
            raise Stopped(self.asked)

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Call `check` before each forward of any module inside, such as those of an evaluation's batches."""

        def look(*_: object) -> None:
            if not torch.compiler.is_compiling():
                self.check()

        self.check()
        hook = register_module_forward_pre_hook(look)
        try:
            yield
        finally:
            hook.remove()
