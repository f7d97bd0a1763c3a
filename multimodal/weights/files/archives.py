"""PyTorch's pickled files, read as data: archives of `torch.save` and TorchScript, and the stream that `torch.save`
wrote before version 1.6. No code of a file runs; nothing is unpacked to disk."""

import io
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError, one_line
from multimodal.system import memory
from multimodal.weights.files.formats import check_format
from multimodal.weights.files.pickled import MOST_BYTES, Instance, read_pickle
from multimodal.weights.files.torchscript import read_classes, state_dict

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # torch/serialization.py
PIECE = 1 << 24  # bytes read at once
WRAPPERS = ("module.", "_orig_mod.")
MOST_DIRECTORY = 4 << 20  # bytes, of 50,000 members
NEITHER = "neither a zip archive nor a pickle, begins with {!r}"
END = (1 << 16) + 98  # bytes at a zip's end: a comment and three records
# errors that damaged files raise here and in zipfile
DAMAGE = (
    OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError, RecursionError, OverflowError, struct.error,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read_archive(path: Path) -> Any:
    """Content of a .pt file, on the CPU: tensors, numbers, texts, lists, tuples and dicts; of a TorchScript archive the
    state dict, equal to `torch.jit.load`'s. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    with _naming(path):
        size = path.stat().st_size
        memory.require(size, path)
        check_format(path)
        with path.open("rb") as file:
            return _content(file, size)


def read_member(file: io.BufferedIOBase, size: int, path: Path) -> dict[str, torch.Tensor]:
    """The state dict in a .pt file of `size` bytes that is part of the file at `path`. Raises CheckpointError."""
    with _naming(path):
        return _state_dict(_content(file, size), path)[0]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        if cause := memory.out_of_memory(error):
            raise CheckpointError(f"{path}: {cause}") from None
        cause = one_line(error, 200)
        cause = cause if isinstance(error, ValueError) else f"a damaged file: {cause}"
        raise CheckpointError(f"{path}: cannot be read as plain tensors ({cause})") from None


def _content(file: io.BufferedIOBase, size: int) -> Any:
    return _reader(file)(file, size)


def _reader(file: io.BufferedIOBase) -> Callable[[io.BufferedIOBase, int], Any]:
    """By the first bytes; the file's position stays at the start."""
    start = file.read(4)
    file.seek(0)
    if start == b"PK\3\4":
        return _read_zip
    if start[:1] == b"\x80":
        return _read_stream
    raise ValueError(NEITHER.format(start))


def check_archive(path: Path) -> None:
    """Raises CheckpointError for a file that `read_archive` cannot read by its first bytes."""
    with _naming(path), path.open("rb") as file:
        _reader(file)


def read_pickled(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state dict of a pickled file, and the configuration of an openai-whisper file ({} for others). Raises
    CheckpointError as `read_archive` does, and for a file that holds anything but tensors."""
    return _state_dict(read_archive(path), path)


def _state_dict(content: Any, path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a state dict, got a {type(content).__name__}")
    config = {"dims": dict(content["dims"])} if isinstance(content.get("dims"), dict) else {}
    for key in ("model_state_dict", "state_dict", "model"):
        if isinstance(content.get(key), dict):
            content = content[key]
            break
    for name, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__}, not a tensor")
    return unwrapped(content), config


def unwrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under names without the prefixes of DistributedDataParallel and torch.compile, if all have them."""
    found = tensors
    while prefix := next((own for own in WRAPPERS if found and all(name.startswith(own) for name in found)), None):
        found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found


def _read_zip(file: io.BufferedIOBase, size: int) -> Any:
    if (directory := _directory(file, size)) > MOST_DIRECTORY:
        raise ValueError(f"a zip directory of {directory} bytes, more than {MOST_DIRECTORY}")
    with zipfile.ZipFile(file) as archive:
        members = _Members(archive, size)
        content = read_pickle(io.BytesIO(members.small("data.pkl")), members.storage)
        if isinstance(content, Instance):
            content = state_dict(content, read_classes(members.code()))
        return content


def _directory(file: io.BufferedIOBase, size: int) -> int:
    """Size in bytes of a zip's directory, which zipfile reads whole (APPNOTE.TXT, 4.3.14 and 4.3.16)."""
    file.seek(max(size - END, 0))
    tail = file.read(END)
    at = tail.rfind(b"PK\5\6")
    (count,) = struct.unpack_from("<I", tail, at + 12) if at >= 0 else (0,)
    if count == 0xFFFFFFFF and (at := tail.rfind(b"PK\6\6")) >= 0:
        (count,) = struct.unpack_from("<Q", tail, at + 40)
    return count


class _Members:
    """Members of a zip archive below its one folder, each read once and up to its stated size."""

    def __init__(self, archive: zipfile.ZipFile, size: int):
        self.archive, self.read = archive, {}
        names = Counter(info.filename for info in archive.infolist())
        for name, times in names.items():
            if times > 1:
                raise ValueError(f"member {name[:80]!r} appears {times} times")
            if ".." in (parts := name.replace("\\", "/").split("/")) or not parts[0]:
                raise ValueError(f"member {name[:80]!r} lies outside the archive")
        roots = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise ValueError(f"not a PyTorch archive ({len(roots) or 'no'} data.pkl)")
        self.root = roots[0].removesuffix("data.pkl")
        self.members = {info.filename.removeprefix(self.root): info for info in archive.infolist()}
        if "byteorder" in self.members and self.small("byteorder").decode() != sys.byteorder:
            raise ValueError(f"not {sys.byteorder}-endian")
        total = sum(info.file_size for name, info in self.members.items() if name.startswith("data/"))
        if total > size:
            raise ValueError(f"its members claim {total} bytes, the file has {size}")

    def small(self, name: str) -> bytes:
        """Member with text or opcodes, which may be compressed."""
        if (size := self.members[name].file_size) > MOST_BYTES:
            raise ValueError(f"member {name!r} has {size} bytes, more than {MOST_BYTES}")
        if self.members[name].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"member {name!r} has a compression that PyTorch never uses")
        with self.archive.open(self.members[name]) as member:
            return member.read(size)

    def code(self) -> dict[str, str]:
        """Source texts of the classes by file."""
        names = [name for name in self.members if name.startswith("code/") and name.endswith(".py")]
        if (total := sum(self.members[name].file_size for name in names)) > MOST_BYTES:
            raise ValueError(f"code of {total} bytes, more than {MOST_BYTES}")
        return {name: self.small(name).decode("utf-8") for name in names}

    def storage(self, key: str, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        if key not in self.read:
            info = self.members[f"data/{key}"]
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"member {info.filename!r} is compressed, which PyTorch never does")
            if info.file_size != count * dtype.itemsize:
                raise ValueError(f"storage {key!r} has {info.file_size} bytes, not {count} x {dtype.itemsize}")
            self.read[key] = torch.UntypedStorage(info.file_size)
            with self.archive.open(info) as member:
                _fill(self.read[key], member, key)
        if (size := self.read[key].nbytes()) != count * dtype.itemsize:
            raise ValueError(f"storage {key!r} has {size} bytes, not {count} x {dtype.itemsize}")
        return self.read[key]


def _read_stream(file: io.BufferedIOBase, size: int) -> Any:
    """The layout before PyTorch 1.6: pickles of a magic number, a version, facts of the machine, the object and the
    keys of its storages, then the bytes of each."""
    storages: dict[str, tuple[torch.UntypedStorage, int]] = {}
    left = size

    def make(key: str, dtype: torch.dtype, count: int) -> torch.UntypedStorage:
        nonlocal left
        if key not in storages:
            left -= count * dtype.itemsize
            if left < 0:
                raise ValueError(f"storage {key!r} has {count} x {dtype.itemsize} bytes, more than the file")
            storages[key] = torch.UntypedStorage(count * dtype.itemsize), count
        if storages[key][0].nbytes() != count * dtype.itemsize:
            raise ValueError(f"storage {key!r} has two sizes")
        return storages[key][0]

    pickles = io.BytesIO(file.read(MOST_BYTES))
    if read_pickle(pickles, make) != MAGIC or read_pickle(pickles, make) != PROTOCOL:
        raise ValueError("a pickle, but not one of torch.save")
    facts = read_pickle(pickles, make)
    if not isinstance(facts, dict) or facts.get("little_endian") is not (sys.byteorder == "little"):
        raise ValueError(f"not {sys.byteorder}-endian")
    content, keys = read_pickle(pickles, make), read_pickle(pickles, make)
    if not isinstance(keys, list) or sorted(keys) != sorted(storages):
        raise ValueError("its list of storages does not match its tensors")
    file.seek(pickles.tell())
    for key in keys:
        storage, count = storages[key]
        if struct.unpack("<q" if sys.byteorder == "little" else ">q", file.read(8)) != (count,):
            raise ValueError(f"storage {key!r} is damaged")
        _fill(storage, file, key)
    return content


def _fill(storage: torch.UntypedStorage, file: io.BufferedIOBase, key: str) -> None:
    target = memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
    for at in range(0, len(target), PIECE):
        part = file.read(min(PIECE, len(target) - at))
        if len(part) != min(PIECE, len(target) - at):
            raise EOFError(f"storage {key!r} is cut off")
        target[at : at + len(part)] = part
