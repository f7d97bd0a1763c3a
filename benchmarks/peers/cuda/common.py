"""Warm-up and CUDA graphs of candidates on a GPU."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.worker import function

# all candidates compile at the same time, each with as many processes as there are processors without this
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")

FIRST = 2  # more runs before the measured ones


def early(folder: Path, device: str, load: str, settings: Mapping[str, Any]) -> Callable[[], Any]:
    """A candidate of `load` that compiles and runs first while loading, and returns that first output."""
    run = function(load)(folder, device, **settings)
    output = run()
    for _ in range(FIRST):
        run()
    release(device)
    return lambda: (run(), output)[1]


def ready(run: Callable[[], Any], device: str, graph: bool = False) -> Callable[[], Any]:
    """Warm up `run` on a GPU; with `graph` capture it as a CUDA graph."""
    if device == "cuda":
        for _ in range(FIRST):
            run()
        run = graphed(run) if graph else run
        release(device)
    return run


def release(device: str) -> None:
    """Free the memory of compilation and warm-up: all candidates of a case share the device."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def graphed(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture `run` as in PyTorch's notes on CUDA graphs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return lambda: (graph.replay(), output)[1]
