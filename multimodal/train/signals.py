"""Signals that ask a run to stop: the step is finished, the state saved, and the program ends with code 75."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from multimodal.system.signals import SIGNALS, handled

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong, run again with --resume


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
