"""Local copies of URLs, made once.

http and https are read here, stores such as s3:// by fsspec in this process. A copy has limits of size and of time
without progress, and ends with this process.
"""

import contextlib
import hashlib
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from multimodal.data.remote.trust import STORES, WEB, Trust
from multimodal.data.remote.web import RefusedError, TransientError, UrlRule, opened
from multimodal.errors import DataError, one_line
from multimodal.system.files import cache_folder

PATIENCE = 60.0  # seconds in which `LEAST` bytes must arrive
LEAST = 1 << 10  # bytes
TRIES = 3
PAUSE = 0.5  # seconds before the second try, doubled before the third
MOST = 64 << 30  # bytes of a shard
MOST_OF_A_ROW = 4 << 30  # bytes of a file in a list
FREE = 256 << 20  # bytes that a copy leaves on the disk
BLOCK = 1 << 18  # bytes


class Opening(NamedTuple):
    """`start` returns a stream with `read(size)` and `close()`. `abort` ends a wait in `start` or `read` from another
    thread; by default that thread is left to the library's timeouts."""

    start: Callable[[], Any]
    abort: Callable[[], None] = lambda: None


def default_cache() -> Path:
    return cache_folder() / "shards"


def fetch(url: str, cache: Path | None = None, rule: UrlRule | None = None, most: int | None = None) -> Path:
    """Return the local copy of a URL, made on the first call; later calls return it even if the source has changed
    (delete the copy to read it again).

    `rule` None: the user's own URL. Raises DataError."""
    rule = rule or UrlRule(url)
    if known_scheme(url) in WEB:
        return kept(url, url, cache, Opening(lambda: opened(url, rule), rule.abort), most)
    return kept(url, url, cache, Opening(lambda: _stored(url)), most)


def known_scheme(url: str) -> str:
    """The scheme of a URL that `fetch` reads. Raises DataError for another."""
    scheme = url.partition(":")[0].lower()
    if scheme not in WEB | STORES:
        raise DataError(f"{url}: URL scheme must be one of {', '.join(sorted(WEB | STORES))} (got {scheme!r})")
    return scheme


def fetch_row(url: str, cache: Path | None, trust: Trust, origin: str) -> Path:
    """Fetch a URL from a list; `origin`: the list's own URL, if it has one. Raises DataError."""
    return fetch(url, cache, UrlRule(url, trust, origin), MOST_OF_A_ROW)


def kept(name: str, identity: str, cache: Path | None, opening: Opening, most: int | None = None) -> Path:
    """Return a cached copy of the opened stream by its `identity`. Raises DataError."""
    from filelock import FileLock

    folder = cache or default_cache()
    ending = re.sub(r"[^\w.-]+", "_", name.split("?")[0].rsplit("/", 1)[-1])[-60:]
    target = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{ending}"
    try:
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):  # one copy for all processes of a machine
            if not target.exists():
                _copy(opening, target, MOST if most is None else most)
    except (OSError, ValueError, EOFError, ImportError, zlib.error, RefusedError) as error:
        line = one_line(error)
        raise DataError(f"{name}: cannot be copied to {folder} ({line})") from None
    return target


def _copy(opening: Opening, target: Path, most: int) -> None:
    part = Path(f"{target}.part")
    try:
        for attempt in range(TRIES):
            try:
                _Copy(opening, part, most).run()
                break
            except TransientError as error:
                if attempt == TRIES - 1:
                    raise OSError(f"{error}, tried {TRIES} times") from None
                time.sleep(PAUSE * 2**attempt)
        if part.stat().st_size == 0:
            raise OSError("empty (0 bytes)")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)


class _Copy:
    """One copy, made by a thread, so that no library can block the caller, which gives it up if it stalls, grows too
    large, or is stopped."""

    def __init__(self, opening: Opening, part: Path, most: int):
        self.opening, self.part, self.most = opening, part, most
        self.count, self.error = 0, None
        self.ended = threading.Event()

    def run(self) -> None:
        """Raises the reader's error, or OSError for a stalled copy."""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._wait()
        finally:
            if not self.ended.is_set():
                self.opening.abort()
                self.ended.wait(1)
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        before, since = 0, time.monotonic()
        while not self.ended.wait(min(0.2, PATIENCE / 4)):
            if self.count >= before + LEAST:
                before, since = self.count, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise OSError(f"given up: {self.count - before} bytes in {PATIENCE:g} s (after {before})")

    def _read(self) -> None:
        try:
            with contextlib.closing(self.opening.start()) as stream, self.part.open("wb") as file:
                while data := stream.read(BLOCK):
                    self.count += len(data)
                    if self.count > self.most:
                        raise OSError(f"too large (over {self.most} bytes)")
                    if shutil.disk_usage(file.fileno()).free < FREE + len(data):
                        raise OSError(f"the disk is full but for {FREE} bytes (after {self.count})")
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def _stored(url: str) -> Any:
    import fsspec

    fsspec.get_filesystem_class(url.partition(":")[0].lower())  # ImportError for a missing driver
    return fsspec.open(url, "rb").open()
