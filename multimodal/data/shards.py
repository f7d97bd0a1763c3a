"""Random access to WebDataset tars through an index (remote ones are copied to this machine, `remote.fetch`).

webdataset itself streams shards through a shuffle buffer, whose state cannot be saved exactly, and a broken member
shifts all after it. With an index every sample has a number, the order is a permutation, and a run resumes in
mid-epoch. The price: local disk for remote shards, and one pass over the headers at the start (about 20,000 members a
second).
"""

import gzip
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from multimodal.data.remote.copies import Opening, kept
from multimodal.errors import DataError, one_line

SMALL = frozenset({"cls", "txt", "json"})  # read along with the index
META = re.compile(r"__[^/]*__($|/)")  # names reserved by webdataset (tariterators.tar_file_iterator)
LARGEST_SMALL, LARGEST = 16 << 20, 1 << 30  # bytes; members are held in memory


class ShardMember(NamedTuple):
    name: str
    offset: int  # bytes
    size: int


class ShardSample(NamedTuple):
    """Members of one key by lower-case ending, the contents of small ones, and the fault, if any."""

    name: str
    members: dict[str, ShardMember]
    small: dict[str, bytes]
    fault: str = ""


def plain_tar(path: Path, cache: Path | None = None) -> Path:
    """Return the tar, or an unpacked copy of a gzip one. Raises DataError."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"\x1f\x8b":
                return path
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    identity = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return kept(str(path), identity, cache, lambda: Opening(lambda: gzip.open(path)))


def shots(path: Path) -> Iterator[ShardSample]:
    """Yield the samples of a tar in order, grouped as by webdataset: neighbours whose names agree up to the first dot
    of the base name. A truncated or damaged shard yields a last, broken sample for what is lost. Raises DataError for a
    file that is not a tar."""
    from webdataset.tariterators import base_plus_ext

    held: ShardSample | None = None
    try:
        with tarfile.open(path, "r:") as tar:
            for member in _members(tar):
                if isinstance(member, str):
                    if held:
                        yield held
                    held = ShardSample("its end", {}, {}, member)
                    break
                key, ending = base_plus_ext(member.name)
                if key is None or META.match(member.name) or not member.isfile() or member.issparse():
                    continue
                if held is None or held.name != key:
                    if held:
                        yield held
                    held = ShardSample(key, {}, {})
                held = _with(held, ending.lower(), ShardMember(member.name, member.offset_data, member.size), tar)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"{path}: not a readable tar ({one_line(error)})") from None
    if held:
        yield held


def _with(shot: ShardSample, ending: str, member: ShardMember, tar: tarfile.TarFile) -> ShardSample:
    if ending in shot.members:
        return shot._replace(fault=f"two members of the same ending ({member.name})")
    shot.members[ending] = member
    if member.size > (LARGEST_SMALL if ending in SMALL else LARGEST):
        return shot._replace(fault=f"{member.name} is too large ({member.size} bytes)")
    if ending in SMALL:
        tar.fileobj.seek(member.offset)
        shot.small[ending] = tar.fileobj.read(member.size)
    return shot


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo | str]:
    """Yield members, then a fault if the file does not end as a tar does (tarfile stops silently)."""
    size = os.fstat(tar.fileobj.fileno()).st_size
    while True:
        try:
            member = tar.next()
        except tarfile.TarError as error:
            ended = "ends early" if tar.offset > size else "is damaged"
            yield f"the shard {ended}, the rest is lost (at byte {min(tar.offset, size)}, {one_line(error)})"
            return
        if member is None:
            break
        if member.offset_data + member.size > size:
            yield f"the shard ends early, the rest is lost (at byte {size}, inside {member.name})"
            return
        yield member
        tar.members.clear()  # tarfile keeps them all
    tar.fileobj.seek(tar.offset)
    block = tar.fileobj.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        yield f"the shard ends early, the rest is lost (at byte {size}, no end mark)"
    elif block.strip(b"\0"):
        yield f"the shard is damaged, the rest is lost (at byte {tar.offset})"


class OpenFiles:
    """Cache of open files for reads at offsets, per process: a forked or pickled copy opens its own."""

    most = 64

    def __init__(self):
        self._process, self._open = 0, OrderedDict()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Raises OSError, or DataError if the file has become shorter."""
        if self._process != os.getpid():
            self._process, self._open = os.getpid(), OrderedDict()
        file = self._open.pop(path, None) or open(path, "rb", buffering=0)  # noqa: SIM115
        self._open[path] = file
        if len(self._open) > self.most:
            self._open.popitem(last=False)[1].close()
        data = os.pread(file.fileno(), size, offset)
        if len(data) != size:
            raise DataError(f"{path}: ends early (got {len(data)} of {size} bytes at {offset})")
        return data

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict:
        return {"_process": 0, "_open": OrderedDict()}

    def __del__(self):
        self.close()
