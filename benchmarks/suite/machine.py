"""Description of the machine: names, versions and peak rates."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import check, process
from benchmarks.suite.cases import Candidate

LIBRARIES = ("torch", "torchaudio", "torchvision", "numpy", "openai-whisper", "faster-whisper", "ctranslate2",
             "transformers", "tokenizers", "tiktoken", "open_clip_torch", "timm", "openvino", "onnxruntime",
             "clip-benchmark")  # fmt: skip

SLOW = 20  # GFLOP/s of small products


def describe(device: str) -> dict[str, Any]:
    found = {
        "date": datetime.date.today().isoformat(), "processor": processor_name(), "processors": os.cpu_count(),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": platform.python_version(), "commit": commit(), "load at the start": round(os.getloadavg()[0], 2),
        "versions": versions(),
    }  # fmt: skip
    if device == "cuda":
        found["device"] = output(sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())")
    return found


def processor_name() -> str:
    """The kernel's name, with features for matrix products."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = [line.partition(":")[::2] for line in path.read_text().splitlines() if ":" in line]
    info = {name.strip(): value.strip() for name, value in reversed(lines)}
    features = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
            if name in info.get("flags", "").split()]  # fmt: skip
    return f"{info.get('model name', platform.machine())} ({', '.join(features)})"


def multiplies_bfloat16() -> bool:
    """Return False on a CPU without instructions for it, where a run takes 50 times as long as in float32."""
    path = Path("/proc/cpuinfo")
    flags = path.read_text().split() if path.exists() else []
    return not flags or any(name in flags for name in ("avx512_bf16", "amx_bf16", "bf16"))


def commit() -> str:
    """The checkout's commit, with "+" for uncommitted changes of code."""
    changed = output("git", "status", "--porcelain", "--untracked-files=no", "--", "multimodal", "benchmarks/*.py")
    return output("git", "rev-parse", "--short", "HEAD") + ("+" if changed else "")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd=process.ROOT, timeout=3600).stdout.strip()


def versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def yardstick(folder: Path, device: str) -> Callable[[], None]:
    """Constant work by numpy, to measure noise: products in the cache and a sum over memory."""
    a, large = np.ones((512, 512), np.float32), np.ones(1 << 24, np.float32)

    def run() -> None:
        for _ in range(8):
            a @ a
        large.sum()

    return run


def ceilings(device: str, threads: int) -> dict[str, float]:
    """Peak rates of matrix products and memory, measured in another process, for the roofline."""
    worker = process.Worker(Candidate("ceilings", "benchmarks.suite.machine:measured", library="torch"), Path(), device,
                            threads)  # fmt: skip
    try:
        worker.ready()
        with tempfile.TemporaryDirectory() as folder:
            worker.ask({"do": "output", "to": f"{folder}/ceilings"})
            return check.read(Path(folder) / "ceilings")
    finally:
        worker.end()


def roofline(row: dict[str, Any], machine: dict[str, Any], kind: str) -> float | None:
    """Lower bound of a run's seconds on this machine (Williams et al. 2009): the longer of computing and reading, with
    bytes counted in float32. None if unknown."""
    top = machine["ceilings"].get(str(row["threads"]), {})
    size = {"float32": 1.0, "bfloat16": 0.5, "int8": 0.25}.get(kind)
    if size is None or not row.get("operations") or f"{kind} GFLOP/s" not in top:
        return None
    computing = row["operations"] / (1e9 * top[f"{kind} GFLOP/s"])
    return max(computing, size * row.get("bytes", 0) / (1e9 * top["read GB/s"]))


def products(a: Any, b: Any) -> Iterator[Callable[[], Any]]:
    """a·b, and on a CPU a·bᵀ by oneDNN with packed b: torch's product has half its speed on some processors."""
    import torch

    yield lambda: a @ b
    if a.device.type == "cpu" and torch.backends.mkldnn.is_available():
        if a.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        laid = torch.ops.mkldnn._reorder_linear_weight(b, len(a))
        yield lambda: torch.ops.mkldnn._linear_pointwise(a, laid, None, "none", [], "")


def measured(folder: Path, device: str) -> Callable[[], dict[str, float]]:
    """GFLOP/s of matrix products by kind, GB/s of reading and of copying."""
    import torch

    large_size, small_size = (8192, 8192) if device == "cuda" else (2048, 256)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def best(run: Callable[[], Any], seconds: float = 1.0) -> float:
        run()
        wait()
        taken, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end or len(taken) < 3:
            start = time.perf_counter()
            run()
            wait()
            taken.append(time.perf_counter() - start)
        return min(taken)

    def rate(name: str, size: int) -> float:
        """GFLOP/s of a product of `size`."""
        if name == "int8":
            a, b = (torch.randint(-64, 64, (size, size), dtype=torch.int8) for _ in range(2))
            seconds = best(lambda: torch._int_mm(a, b))
        else:
            a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, name)) for _ in range(2))
            seconds = min(map(best, products(a, b)))
        return round(2 * size**3 / seconds / 1e9, 1)

    @torch.inference_mode()
    def run() -> dict[str, float]:
        found = {}
        for name in ("float32", "bfloat16", *(("int8",) if device == "cpu" else ())):
            found[f"{name} GFLOP/s"] = rate(name, small_size)
            if found[f"{name} GFLOP/s"] > SLOW:  # else a processor without this arithmetic, which would take minutes
                found[f"{name} GFLOP/s"] = rate(name, large_size)
        large = torch.ones((1 << 30 if device == "cuda" else 1 << 27), device=device)
        found["read GB/s"] = round(large.nbytes / best(large.sum) / 1e9, 1)
        to = torch.empty_like(large)
        found["copy GB/s"] = round(2 * large.nbytes / best(lambda: to.copy_(large)) / 1e9, 1)
        return found

    return run
