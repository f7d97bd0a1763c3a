"""The process of one candidate: it loads, then follows orders, one JSON line each.

    python -m benchmarks.suite.worker '{"load": "module:function", "folder": …, "device": …, "settings": {…}}'

Orders: {"do": "output", "to": path} · {"do": "run", "repeats": n}. Stdout has only answers; libraries print to stderr.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resident(name: str) -> float:
    """Resident MB: VmRSS now, VmHWM the peak since `forget`; always the peak where there is no /proc."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def forget() -> None:
    """Reset the peak resident size."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def wait(device: str) -> None:
    if device == "cuda" and "torch" in sys.modules:
        sys.modules["torch"].cuda.synchronize()


def device_memory(device: str, reset: bool = False) -> float | None:
    if device != "cuda" or "torch" not in sys.modules:
        return None
    cuda = sys.modules["torch"].cuda
    if reset:
        cuda.reset_peak_memory_stats()
    return round(cuda.max_memory_allocated() / 2**20, 1)


def processor_time() -> float:
    """Seconds of this process and of those that it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(run: Callable[[], Any], repeats: int, device: str) -> dict[str, float]:
    wait(device)
    worked, start = processor_time(), time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return {"wall": (time.perf_counter() - start) / repeats, "cpu": (processor_time() - worked) / repeats}


def written(run: Callable[[], Any], to: Path, device: str) -> dict[str, float]:
    """Run once and save the output."""
    from benchmarks.suite.check import save

    outputs: list[Any] = []
    found = timed(lambda: outputs.append(run()), 1, device)
    save(outputs[0], to)
    return found


def serve(spec: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    start, device = time.perf_counter(), spec["device"]
    run = function(spec["load"])(Path(spec["folder"]), device, **spec["settings"])
    wait(device)
    try:
        version = importlib.metadata.version(spec["library"])
    except importlib.metadata.PackageNotFoundError:
        version = ""
    ready = {"ready": round(time.perf_counter() - start, 3), "version": version, "loaded MB": resident("VmRSS")}
    answer(ready | {"loaded device MB": device_memory(device, reset=True)})
    forget()
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "output":
            found = written(run, Path(order["to"]), device)
        else:
            found = timed(run, order["repeats"], device)
        answer(found | {"peak MB": resident("VmHWM"), "peak device MB": device_memory(device)})


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=out, flush=True)

    try:
        serve(json.loads(sys.argv[1]), answer)
    except ModuleNotFoundError as error:
        answer({"missing": str(error)})
        raise SystemExit(1) from error
    except Exception as error:
        answer({"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        raise


if __name__ == "__main__":
    main()
