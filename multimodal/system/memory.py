"""Free memory, and errors that name what needs too much."""

import ctypes
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from multimodal.errors import CheckpointError

NO_MEMORY = "allocate memory|out of memory|Storage size calculation overflowed|ALLOC_FAILED"  # torch's RuntimeErrors
# Bytes that a C library of glibc keeps for the next call once a block of them has been freed (mallopt(3), dynamic
# thresholds).
KEPT = 31 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # malloc.h
# A container's limit: of cgroup v2, and of v1, whose "none" is beyond any memory.
CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


@cache
def keep_freed_memory() -> None:
    """Let this process use large blocks again in place of returning them. Fresh memory from the system takes a tenth to
    a fifth of an encoder's time, and as long as the filterbank of a recording."""
    bytes(KEPT)


@contextmanager
def keeping_memory() -> Iterator[None]:
    """Keep all that is freed inside the block for this process, with a C library of glibc, and return it at the end.

    A training step frees gigabytes that the next one needs again: fresh memory for blocks of more than 32 MB, and for a
    heap that was cut, takes up to a third of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:  # setting one of them ended the dynamic thresholds: these are theirs after KEPT bytes
        mallopt(M_MMAP_THRESHOLD, KEPT)
        mallopt(M_TRIM_THRESHOLD, 2 * KEPT)
        mallopt(M_MMAP_MAX, 65536)
        ctypes.CDLL(None).malloc_trim(0)


def out_of_memory(error: BaseException) -> str:
    """Describe an out-of-memory error, with the size that it gives; '' for other errors."""
    if not (isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and re.search(NO_MEMORY, str(error)))):
        return ""
    asked = re.search(r"allocate (\d[\d.]* \w+)", str(error))
    return f"not enough memory ({asked[1]} asked for at once)" if asked else "not enough memory"


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Turn an out-of-memory error inside the block into a CheckpointError that names `what`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if cause := out_of_memory(error):
            raise CheckpointError(f"{what}: {cause}") from None
        raise


def require(needed: int, what: object) -> None:
    """Raise CheckpointError that names `what` if fewer than `needed` bytes are free."""
    if needed > (free := available()):
        raise CheckpointError(f"{what}: needs {size_text(needed)} of memory, {size_text(free)} are free")


def available() -> int:
    """Bytes that this process can still take: the least of the system's, its container's and its own limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    limits = [os.sysconf("SC_PHYS_PAGES") * page]
    if system := re.search(r"MemAvailable:\s+(\d+) kB", _text("/proc/meminfo")):
        limits.append(int(system[1]) * 1024)
    limits += [int(text) for text in map(_text, CONTAINER) if text.strip().isdecimal()]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used = _text("/proc/self/statm").split()
        limits.append(max(limit - (int(used[0]) * page if used else 0), 0))
    return min(limits)


def size_text(count: int) -> str:
    """A number of bytes, as in "12.3 GB"."""
    power = 0
    while count >= 1000 ** (power + 1) and power < len(UNITS) - 1:
        power += 1
    return f"{count} bytes" if not power else f"{count / 1000**power:.1f} {UNITS[power]}"


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
