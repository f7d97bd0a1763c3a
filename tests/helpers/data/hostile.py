"""Pickled checkpoints that would do harm if anything in them ran."""

import io
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

TARGET = "victim.txt"  # what the hostile files would write, in the working folder


class Writes:
    """Reducer that a plain unpickler calls: `os.system`, or another function with its arguments."""

    def __init__(self, function: Callable = os.system, *arguments: object):
        self.call = function, arguments or (f"echo pwned > {TARGET}",)

    def __reduce__(self):
        return self.call


class Restores(torch.nn.Module):
    """Object whose `__setstate__` opens a file for writing: loading it creates or overwrites the file."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @torch.jit.export
    def __getstate__(self):
        return self.weight, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, bool]):
        self.training = state[1]
        # read here, since TorchScript drops unused attributes
        self.weight = torch.from_file("victim.txt", shared=True, size=33, dtype=torch.uint8).fill_(65)


class Holds(torch.nn.Module):
    """Module with the hostile one as its child."""

    def __init__(self):
        super().__init__()
        self.inner = Restores()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def hostile_script(path: str | Path, module: type[torch.nn.Module] = Restores) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module()).save(str(path))


class Unpickler(pickle.Unpickler):
    def persistent_load(self, _: object) -> object:
        return torch.ones(2)._typed_storage()


def run(path: str | Path) -> None:
    """Run a hostile pickle, as Python's own unpickler does."""
    data = Path(path).read_bytes()
    streams = [data]
    if data.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            streams = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    stream = io.BytesIO(streams[0])
    for _ in range(1 if data.startswith(b"PK") else 4):  # the old layout has three short pickles before it
        Unpickler(stream).load()


def hostile_pickle(path: str | Path, zipped: bool = True, content: object = None) -> None:
    content = {"weight": torch.ones(2), "more": Writes()} if content is None else content
    torch.save(content, path, _use_new_zipfile_serialization=zipped)


def hostile_tar(path: str | Path, mode: str = "w") -> None:
    """A `.nemo`-like file: a configuration and pickled weights in a tar."""
    inside = io.BytesIO()
    hostile_pickle(inside)
    with tarfile.open(path, mode) as tar:
        for name, data in {"model_config.yaml": b"a: 1", "model_weights.ckpt": inside.getvalue()}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def rezipped(path: str | Path, change: Callable[[dict[str, bytes]], list[tuple[str, bytes]] | None],
             compression: int = zipfile.ZIP_STORED, content: object = None) -> None:  # fmt: skip
    """A plain archive whose members went through `change`, which may give pairs in place of the table."""
    plain = io.BytesIO()
    torch.save({"weight": torch.arange(6.0).reshape(2, 3)} if content is None else content, plain)
    with zipfile.ZipFile(plain) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    pairs = change(members) or list(members.items())
    with zipfile.ZipFile(path, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of zipfile, about a name that is there twice
        for name, data in pairs:
            archive.writestr(name, data)


def cut(path: str | Path, share: float) -> None:
    """The first part of a plain archive."""
    rezipped(path, lambda members: None)
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(share * len(data))])


def opcodes(path: str | Path, change: Callable[[bytes], bytes], content: object = None) -> None:
    """A plain archive with another `data.pkl`."""

    def swap(members: dict[str, bytes]) -> None:
        name = next(name for name in members if name.endswith("/data.pkl"))
        members[name] = change(members[name])

    rezipped(path, swap, content=content)


def bare(*parts: bytes) -> bytes:
    """A pickle of these opcodes."""
    return b"\x80\x02" + b"".join(parts) + b"."


def tensor_opcodes(count: int, offset: int, size: tuple, stride: tuple, key: str = "0") -> bytes:
    """The pickle of a state dict with one tensor of a storage that may not hold it."""

    class Raw:
        def __reduce__(self):
            from collections import OrderedDict

            return torch._utils._rebuild_tensor_v2, (Id(), offset, size, stride, False, OrderedDict())

    class Id:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> tuple | None:
            return ("storage", torch.FloatStorage, key, "cpu", count) if isinstance(value, Id) else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump({"weight": Raw()})
    return stream.getvalue()
