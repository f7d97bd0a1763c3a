"""Random access to WebDataset tars through an index (remote ones are copied to this machine, `remote.fetch`).

webdataset itself streams shards through a shuffle buffer, whose state cannot be saved exactly, and a broken member
shifts all after it. With an index every sample has a number, the order is a permutation, and a run resumes in
mid-epoch. The price: local disk for remote shards, and one pass over the headers at the start (about 20,000 members a
second).
"""

import glob
import gzip
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from multimodal.data.remote.copies import Opening, kept, known_scheme
from multimodal.data.remote.trust import is_remote
from multimodal.errors import DataError, one_line
from multimodal.system.tars import Header
from multimodal.tokens.audio.reading import SUFFIXES as SOUNDS
from multimodal.tokens.image.reading import SUFFIXES as IMAGES

TARS = (".tar", ".tar.gz", ".tgz")
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


def expanded(data: str) -> list[str]:
    """Expand `::`, braces, globs and folders of tars into local paths and URLs. Raises DataError."""
    if Path(data).is_dir():
        return _folder_tars(Path(data)) or [data]
    if Path(data).exists():
        return [data]
    from webdataset.shardlists import expand_urls

    try:
        parts = expand_urls(data)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise DataError(f"{data}: the pattern cannot be expanded ({error})") from None
    for url in filter(is_remote, parts):
        known_scheme(url)
    found = []
    for part in parts:
        if is_remote(part) or not glob.has_magic(part) or Path(part).exists():
            found += [part] if part == data else expanded(part)
        else:
            found += sorted(glob.glob(part))
    return found


def _folder_tars(folder: Path) -> list[str]:
    """Raises DataError for tars of several sets, such as training and test, which must not be mixed."""
    tars = sorted(p for p in folder.iterdir() if p.name.endswith(TARS))
    sets = sorted({tar.name.split(".")[0].rstrip("0123456789") for tar in tars})
    if len(sets) > 1:
        raise DataError(
            f"{folder}: holds tars of several sets ({', '.join(sets)}): name one, as {folder}/{sets[0]}*.tar"
        )
    return [str(tar) for tar in tars]


def is_tar(part: str) -> bool:
    return part.split("?")[0].lower().endswith(TARS) and not Path(part).is_dir()


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
    return kept(str(path), identity, cache, Opening(lambda: gzip.open(path)))


def shots(path: Path, name: str) -> Iterator[ShardSample]:
    """Yield the samples of a tar in order, grouped as by webdataset: neighbours whose names agree up to the first dot
    of the base name. A truncated or damaged shard yields a last, broken sample for what is lost. Raises DataError for a
    file that is not a tar; `name`: of the shard in errors."""
    from webdataset.tariterators import base_plus_ext

    held: ShardSample | None = None
    try:
        with tarfile.open(path, "r:", tarinfo=Header) as tar:
            for member in _members(tar):
                if isinstance(member, str):
                    if held:
                        yield held
                    held = ShardSample("its end", {}, {}, member)
                    break
                key, ending = base_plus_ext(member.name)
                if key is None or META.match(member.name) or not member.isfile():
                    continue
                if held is None or held.name != key:
                    if held:
                        yield held
                    held = ShardSample(key, {}, {})
                if member.issparse():
                    held = held._replace(fault=f"{member.name} is a sparse file, which is not read")
                else:
                    held = _with(held, ending.lower(), ShardMember(member.name, member.offset_data, member.size), tar)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"{name}: not a readable tar ({one_line(error)})") from None
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


def medium(members: dict[str, ShardMember]) -> tuple[ShardMember | None, str]:
    """Return a sample's image, or its audio if that comes first, or the fault. One `jpg` counts beside a `mask.png`;
    of `v1.jpg` and `v2.jpg`, names with dots whose samples became one, neither does."""
    last = {ending: f".{ending.rpartition('.')[2]}" for ending in members}
    media = [ending for ending in members if last[ending] in IMAGES | SOUNDS]
    if not media:
        return None, f"no image or audio file among its members ({', '.join(members)})"
    kind = IMAGES if last[media[0]] in IMAGES else SOUNDS
    alike = [ending for ending in media if last[ending] in kind]
    chosen = [ending for ending in alike if "." not in ending] if len(alike) > 1 else alike
    if len(chosen) != 1:
        return None, f"several {'images' if kind is IMAGES else 'audio files'} in one sample ({', '.join(alike)})"
    return members[chosen[0]], ""


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
        if member.offset_data + member.size > size and not member.issparse():
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
