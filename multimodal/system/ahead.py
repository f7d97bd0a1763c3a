"""An iterator that a thread runs ahead of its reader."""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
POLL = 0.1  # seconds


class _End(NamedTuple):
    error: BaseException | None


class Ahead(Generic[Item]):
    """Starts at once and stays at most `most` items ahead. An error is raised where the reader comes to it; `close`
    ends the thread."""

    def __init__(self, items: Iterable[Item], most: int):
        self._queue: queue.Queue[Any] = queue.Queue(most)
        self._closed = threading.Event()
        threading.Thread(target=self._run, args=(items,), daemon=True, name="ahead").start()

    def _run(self, items: Iterable[Item]) -> None:
        error = None
        try:
            for item in items:
                if not self._put(item):
                    return
        except BaseException as cause:
            error = cause
        self._put(_End(error))

    def _put(self, item: Any) -> bool:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=POLL)
                return True
        return False

    def __iter__(self) -> Iterator[Item]:
        while not isinstance(item := self._queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    def close(self) -> None:
        self._closed.set()
