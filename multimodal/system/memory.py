"""Memory: how much is free, and errors that name what asked for too much."""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multimodal.errors import CheckpointError, MultimodalError

NO_MEMORY = "allocate memory|out of memory|Storage size calculation overflowed|ALLOC_FAILED"  # torch's RuntimeErrors
UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


def out_of_memory(error: BaseException) -> str:
    """The cause in one phrase where memory ran out, with the size where the error gives it; '' for other errors."""
    if not (isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and re.search(NO_MEMORY, str(error)))):
        return ""
    asked = re.search(r"allocate (\d[\d.]* \w+)", str(error))
    return f"not enough memory ({asked[1]} asked for at once)" if asked else "not enough memory"


@contextmanager
def naming(what: object, kind: type[MultimodalError] = CheckpointError) -> Iterator[None]:
    """Raises `kind`, which names `what`, where memory runs out inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if cause := out_of_memory(error):
            raise kind(f"{what}: {cause}") from None
        raise


def require(needed: int, what: object) -> None:
    """Raises CheckpointError, which names `what`, where fewer than `needed` bytes are free."""
    if needed > (free := available()):
        raise CheckpointError(f"{what}: needs {size_text(needed)} of memory, {size_text(free)} are free")


def available() -> int:
    """Bytes that this process can still take: the system's, a container's and its own limit, the least of them."""
    page = os.sysconf("SC_PAGE_SIZE")
    found = [os.sysconf("SC_PHYS_PAGES") * page]
    if system := re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo")):
        found.append(int(system[1]) * 1024)
    if (container := _text("/sys/fs/cgroup/memory.max").strip()).isdecimal():
        found.append(int(container))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        held = _text("/proc/self/statm").split()
        found.append(max(limit - (int(held[0]) * page if held else 0), 0))
    return min(found)


def size_text(count: int) -> str:
    """12.3 GB of a number of bytes."""
    power = 0
    while count >= 1000 ** (power + 1) and power < len(UNITS) - 1:
        power += 1
    return f"{count} bytes" if not power else f"{count / 1000**power:.1f} {UNITS[power]}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
