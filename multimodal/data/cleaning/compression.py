"""Plain, gzip and Zstandard files, by their ending."""

import gzip
import io
import sys
from pathlib import Path
from typing import IO

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def opened(path: Path, file: IO[bytes]) -> io.BufferedIOBase:
    """A reader of the text behind an open `file`."""
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=file, mode="rb")
    return zstd.ZstdFile(file) if path.suffix.lower() == ".zst" else file


def compressed(path: Path, data: bytes) -> bytes:
    """Data as a member of a file that may have several; the same bytes give the same member."""
    if path.suffix.lower() == ".gz":
        return gzip.compress(data, 6, mtime=0)
    return zstd.compress(data) if path.suffix.lower() == ".zst" else data
