"""Several recordings or windows side by side: each is a generator, and what all of them wait for is one batch."""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multimodal.errors import MultimodalError
from multimodal.tasks.encode.attempts import in_parts

Stream = Generator[Any, Any, Any]
Key = Callable[[Any], Hashable]


@dataclass
class _Running:
    stream: Stream
    request: Any = None
    result: Any | MultimodalError = None
    ended: bool = False

    def go_on(self, answer: Any) -> None:
        """Runs the stream to its next request, or its end."""
        try:
            self.request = self.stream.send(answer)
        except StopIteration as stop:
            self.result, self.ended = stop.value, True
        except MultimodalError as error:
            self.result, self.ended = error, True

    def fail(self, error: Exception) -> None:
        """Raises `error` in the stream, where it waits for its answer."""
        try:
            self.request = self.stream.throw(error)
        except StopIteration as stop:
            self.result, self.ended = stop.value, True
        except MultimodalError as cause:
            self.result, self.ended = cause, True


def run(
    streams: Iterable[Stream], serve: Callable[[list[Any]], list[Any]], width: int, key: Key = lambda request: None
) -> Iterator[Any | MultimodalError]:
    """What each stream returns, as it ends; a MultimodalError that ended one stands in its place.

    A stream yields requests and is sent the answers. Up to `width` streams run at once, each next one is taken when
    a place is free, and `serve` gets requests of those that run, at most one of each: with a `width` of 1 one at a
    time. As long as an answer does not depend on the other requests of its call, nor does any result depend on
    `width`.

    Where `serve` fails, it gets fewer requests at a time; the failure of a single one is raised in its stream.

    Requests whose `key` is None are served at once. Where there are none, those with the most frequent key are, so
    that requests which only make a batch among themselves wait for each other."""
    waiting, running = iter(streams), []
    while True:
        while len(running) < width and (stream := next(waiting, None)) is not None:
            running.append(begun := _Running(stream))
            begun.go_on(None)
            if begun.ended:
                yield running.pop().result
        if not running:
            return
        chosen = _batch(running, key)
        requests = [one.request for one in chosen]
        for one, answer in zip(chosen, in_parts(lambda part: serve(requests[part]), len(chosen)), strict=True):  # noqa: B023
            one.fail(answer) if isinstance(answer, Exception) else one.go_on(answer)
        over, running = [one for one in chosen if one.ended], [one for one in running if not one.ended]
        for one in over:
            yield one.result


def _batch(running: list[_Running], key: Key) -> list[_Running]:
    keys = [key(one.request) for one in running]
    wanted = None if None in keys else max(dict.fromkeys(keys), key=keys.count)
    return [one for one, own in zip(running, keys, strict=True) if own == wanted]
