"""Several recordings or windows side by side: each is a generator, and what all of them wait for is one batch."""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multimodal.errors import MultimodalError

Stream = Generator[Any, Any, Any]
Key = Callable[[Any], Hashable]


@dataclass
class _Running:
    number: int
    stream: Stream
    request: Any = None


def run(
    streams: Iterable[Stream], serve: Callable[[list[Any]], list[Any]], width: int, key: Key = lambda request: None
) -> Iterator[Any | MultimodalError]:
    """What each stream returns, in the order of the streams; a MultimodalError that ended one stands in its place.

    A stream yields requests and is sent the answers. Up to `width` streams run at once, each next one is taken when
    a place is free, and `serve` gets requests of those that run, at most one of each: with a `width` of 1 one at a
    time. As long as an answer does not depend on the other requests of its call, nor does any result depend on
    `width`.

    Requests whose `key` is None are served at once. Where there are none, those with the most frequent key are, so
    that requests which only make a batch among themselves wait for each other."""
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
        chosen = _batch(running, key)
        answers = serve([one.request for one in chosen])
        over = {one.number for one, answer in zip(chosen, answers, strict=True) if not _go_on(one, answer, ended)}
        running = [one for one in running if one.number not in over]


def _batch(running: list[_Running], key: Key) -> list[_Running]:
    keys = [key(one.request) for one in running]
    wanted = None if None in keys else max(dict.fromkeys(keys), key=keys.count)
    return [one for one, own in zip(running, keys, strict=True) if own == wanted]


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
