"""Stop signals. Handlers only set a flag, since an exception from one could leave a lock taken or a file half written.
A thread ends the process, whatever the main thread is doing."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

GRACE = 1.0  # seconds that a write may still take
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
Last = Callable[[], str | None]

_last: list[Last] = []
_writing = threading.RLock()


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None], wake: int = -1) -> Iterator[None]:
    """Route these signals to `handler`, which may only set a flag, and their bytes to the descriptor `wake`. Does
    nothing outside the main thread, nor for SIGHUP where it is ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    outer = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(outer, warn_on_full_buffer=False)
        for number, was in before.items():
            signal.signal(number, signal.SIG_DFL if was is None else was)  # None: not set by Python


@contextlib.contextmanager
def ending(numbers: Iterable[int] = ENDS, otherwise: Last = lambda: None) -> Iterator[None]:
    """End the process with 128 + number on one of these signals, from a thread, so that nothing in the main thread can
    delay it. `unbroken` writes finish first. `otherwise`: gives the line to print where no `at_stop` prints one."""
    # a shell ignores SIGINT for jobs started with &
    taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    out, into = os.pipe()
    os.set_blocking(into, False)
    thread = threading.Thread(target=_watch, args=(out, taken, otherwise), daemon=True, name="signals")
    thread.start()
    try:
        with handled(taken, _nothing, into):
            yield
    finally:
        os.write(into, b"\0")
        thread.join()
        os.close(out)
        os.close(into)


@contextlib.contextmanager
def at_stop(last: Last) -> Iterator[None]:
    """Call `last` if `ending` ends the process within the block, and print the line that it returns. It runs in another
    thread."""
    _last.append(last)
    try:
        yield
    finally:
        _last.remove(last)


def unbroken() -> contextlib.AbstractContextManager:
    """Context of a short write: a stop waits for its end, at most `GRACE`."""
    return _writing


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handler: the byte in the pipe is the flag."""


def _watch(out: int, taken: list[int], otherwise: Last) -> None:
    while number := os.read(out, 1)[0]:
        if number in taken:
            _end(number, otherwise)


def _end(number: int, otherwise: Last) -> None:
    leaving = threading.Thread(target=_leave, args=(otherwise,), daemon=True)
    leaving.start()
    leaving.join(2 * GRACE)
    os._exit(128 + number)


def _leave(otherwise: Last) -> None:
    _writing.acquire(timeout=GRACE)
    with contextlib.suppress(Exception):
        if os.isatty(2):
            os.write(2, b"\r\x1b[K")  # a progress bar
    said = [_say(last) for last in reversed(_last)]  # each is called
    if not any(said):
        _say(otherwise)
    with contextlib.suppress(Exception):
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()


def _say(last: Last) -> bool:
    """Return True if it prints a line."""
    with contextlib.suppress(Exception):
        if line := last():
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))
            return True
    return False


SIGNALS = (*ENDS, signal.SIGUSR1)
