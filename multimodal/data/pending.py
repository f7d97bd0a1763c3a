"""Items of a source in work, so that results and errors name them."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from multimodal.data.loader import BROKEN
from multimodal.data.sources import Sample, Source


class PendingItems:
    """Hands out the media of a source's items, with their keys or to be found again by the media themselves.

    `check(sample)` may raise one of `BROKEN`. `broken`: location and cause of each unusable item by its key."""

    def __init__(self, source: Source, keys: Iterable[int], check: Callable[[Sample], object] = lambda sample: None):
        self.source, self.keys, self.check = source, keys, check
        self.broken: dict[int, str] = {}
        self._waiting: dict[int, deque[tuple[int, Path | bytes]]] = {}  # by identity of the media

    def keyed(self) -> Iterator[tuple[int, Path | bytes]]:
        """Yield key and media of the usable items, each read on access."""
        for key in self.keys:
            try:
                sample = self.source.read(key)
                self.check(sample)
            except BROKEN as error:
                self.skip(key, error)
            else:
                yield key, sample.media

    def media(self) -> Iterator[Path | bytes]:
        """Yield the media alone; `take` gives their keys."""
        for key, media in self.keyed():
            self._waiting.setdefault(id(media), deque()).append((key, media))
            yield media

    def take(self, media: Path | bytes) -> int:
        """Key of media that are done."""
        same = self._waiting[id(media)]
        key, _ = same.popleft()
        if not same:
            del self._waiting[id(media)]
        return key

    def skip(self, key: int, cause: object) -> None:
        """Record why an item is unusable; its location replaces the name that bytes have in messages."""
        name, text = self.source.name(key), re.sub(r"^(?:<bytes>|\d+ bytes): ", "", str(cause))
        self.broken[key] = text if name in text else f"{name}: {text}"

    def causes(self) -> list[str]:
        """Unusable items in the order of the source."""
        return [self.broken[key] for key in sorted(self.broken)]
