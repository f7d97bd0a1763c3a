"""Batched execution of generators: the requests that all of them wait for form one batch."""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from multimodal.errors import MultimodalError
from multimodal.tasks.encode.attempts import in_parts_of

Stream = Generator[Any, Any, Any]
Key = Callable[[Any], Hashable]


@dataclass
class _Running:
    stream: Stream
    request: Any = None
    result: Any | MultimodalError = None
    ended: bool = False

    def resume(self, answer: Any) -> None:
        """Run the stream to its next request or its end; an exception as the answer is raised inside."""
        try:
            self.request = self.stream.throw(answer) if isinstance(answer, Exception) else self.stream.send(answer)
        except StopIteration as stop:
            self.result, self.ended = stop.value, True
        except MultimodalError as error:
            self.result, self.ended = error, True


def run(
    streams: Iterable[Stream], serve: Callable[[list[Any]], list[Any]], width: int, key: Key = lambda request: None
) -> Iterator[Any | MultimodalError]:
    """Yield the return value of each stream as it ends, or the MultimodalError that ended it.

    A stream yields requests and receives the answers. Up to `width` streams run at once; the next one is taken when
    one ends. `serve` answers a batch of requests, at most one of each stream. Results do not depend on `width` if
    answers do not depend on their batch. If `serve` fails, the batch is split until a single request fails, whose
    error is raised in its stream.

    Requests whose `key` is None are served first, else those with the most frequent key: requests that must share a
    key to share a batch wait for each other."""
    waiting, running = iter(streams), []
    while True:
        while len(running) < width and (stream := next(waiting, None)) is not None:
            running.append(started := _Running(stream))
            started.resume(None)
            if started.ended:
                yield running.pop().result
        if not running:
            return
        batch = _batch(running, key)
        for one, answer in zip(batch, in_parts_of(serve, [one.request for one in batch]), strict=True):
            one.resume(answer)
        ended, running = [one for one in batch if one.ended], [one for one in running if not one.ended]
        for one in ended:
            yield one.result


def _batch(running: list[_Running], key: Key) -> list[_Running]:
    keys = [key(one.request) for one in running]
    chosen = None if None in keys else max(dict.fromkeys(keys), key=keys.count)
    return [one for one, own in zip(running, keys, strict=True) if own == chosen]
