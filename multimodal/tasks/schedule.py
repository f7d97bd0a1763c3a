"""Several recordings or windows side by side: each is a generator, and what all of them wait for is one batch."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multimodal.errors import MultimodalError

Stream = Generator[Any, Any, Any]


@dataclass
class _Running:
    number: int
    stream: Stream
    request: Any = None


def run(
    streams: Iterable[Stream], serve: Callable[[list[Any]], list[Any]], width: int
) -> Iterator[Any | MultimodalError]:
    """What each stream returns, in the order of the streams; a MultimodalError that ended one stands in its place.

    A stream yields requests and is sent the answers. Up to `width` streams run at once, each next one is taken when
    a place is free, and `serve` gets one request of each that runs: with a `width` of 1 one at a time. As long as an
    answer does not depend on the other requests of its call, nor does any result depend on `width`."""
    waiting, ended = enumerate(iter(streams)), {}
    running: list[_Running] = []
    due = 0
    while True:
        while len(running) < width and (entry := next(waiting, None)) is not None:
            begun = _Running(*entry)
            if _go_on(begun, None, ended):
                running.append(begun)
        while due in ended:
            yield ended.pop(due)
            due += 1
        if not running:
            return
        answers = serve([one.request for one in running])
        running = [one for one, answer in zip(running, answers, strict=True) if _go_on(one, answer, ended)]


def _go_on(one: _Running, answer: Any, ended: dict[int, Any]) -> bool:
    """Runs a stream to its next request; False when it has ended, its result then is in `ended`."""
    try:
        one.request = one.stream.send(answer)
    except StopIteration as stop:
        ended[one.number] = stop.value
    except MultimodalError as error:
        ended[one.number] = error
    else:
        return True
    return False
