"""Output files that grow in `NAME.part` until they are complete."""

import os
from pathlib import Path
from typing import IO

from multimodal.data.cleaning.compression import compressed
from multimodal.errors import UsageError
from multimodal.system.outputs import naming, place


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


class Target:
    """A file to write. Raises UsageError for a .part that `is_ours` does not vouch for."""

    def __init__(self, path: Path, is_ours: bool):
        self.path, self.part = path, part_of(path)
        self._file: IO[bytes] | None = None
        if not is_ours and self.part.exists() and self.part.stat().st_size:
            raise UsageError(f"{self.part}: exists and is no part of this run; move it away")

    def holds(self, size: int) -> bool:
        """Return True if the part has that many bytes or more."""
        return self.part.is_file() and self.part.stat().st_size >= size

    def open(self, size: int) -> None:
        """Write on after the first `size` bytes."""
        self._file = self.part.open("r+b" if size else "wb")
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, data: bytes) -> None:
        if data:
            with naming(self.part):
                self._file.write(compressed(self.path, data))

    def flushed(self) -> int:
        """Bring all to disk; return the bytes so far."""
        with naming(self.part):
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._file.tell()

    def place(self) -> None:
        """Move the complete part to `path`, unless an earlier call did."""
        if self._file is None and not self.part.exists():
            return
        if self._file is None:
            self._file = self.part.open("r+b")
        elif not self._file.tell() and (nothing := compressed(self.path, b"")):  # an empty gzip has a header
            self._file.write(nothing)
        place(self._file, self.path)

    def close(self, remove: bool) -> None:
        """`remove`: the part too."""
        if self._file is not None:
            self._file.close()
            if remove:
                self.part.unlink(missing_ok=True)
