"""Out-of-memory errors name the file."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from multimodal.errors import CheckpointError
from multimodal.system import memory
from multimodal.weights import convert, load

SIZE = 40 << 20  # more than any block that a C library keeps, less than the heap of a thread
PAGES = SIZE // resource.getpagesize()


def test_what_is_free_is_less_than_the_machine_has_and_less_than_the_limit(monkeypatch):
    assert 0 < memory.available() < 1 << 50
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (held + (64 << 20), held + (64 << 20)))
    assert memory.available() <= 64 << 20
    monkeypatch.setattr(memory, "_text", lambda path: "4096\n" if "limit_in_bytes" in path else "")  # cgroup v1
    assert memory.available() == 4096


def test_a_need_beyond_what_is_free_names_file_and_sizes(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 2_500_000)
    memory.require(2_500_000, "x.pt")
    with pytest.raises(CheckpointError, match=r"^x\.pt: needs 60\.0 GB of memory, 2\.5 MB are free$"):
        memory.require(60 * 10**9, "x.pt")


@pytest.mark.parametrize("command", [lambda path, to: load.load(path), convert.convert])
def test_memory_that_runs_out_while_loading_names_the_file(tmp_path, monkeypatch, command):
    (tmp_path / "x.safetensors").write_bytes(b"")

    def ask(*_: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(load, "_read", ask)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: not enough memory"):
        command(tmp_path / "x.safetensors", tmp_path / "out")


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes"), memory.naming("x"):
        raise RuntimeError("shapes differ")
    with pytest.raises(CheckpointError, match=r"^x: not enough memory$"), memory.naming("x"):
        raise MemoryError


def test_freed_memory_is_kept_inside_the_block_alone():
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library has no mallopt")

    def faults(size: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = torch.ones(size, dtype=torch.uint8)
        del block
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with memory.keeping_memory():
        assert min(faults(SIZE) for _ in range(4)) < PAGES // 10  # a small block may take the place of a large one
        inside = held()
    assert held() < inside - SIZE // 2
    assert min(faults(8 * SIZE) for _ in range(2)) > PAGES  # returned again, as no hole of the heap is as large
