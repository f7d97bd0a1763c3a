"""Run functions in several processes, as torchrun would, without importing torch in each."""

import functools
import multiprocessing.forkserver
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.helpers.paths import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
# what the first optimizer, DDP and FSDP2 import late
CONTEXT.set_forkserver_preload(
    ["tests.helpers.processes.several_cases", "torch._dynamo.convert_frame", "torch.onnx", "torch.distributed.fsdp"]
)
LIMIT = 300  # seconds; a starved machine is slow, a hang is longer


def spawn(function: Callable, world: int, *args: Any) -> list[Any]:
    """Run `function(*args)` in each of `world` processes; return results, or exceptions as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _serve()
    ends, processes = [], []
    for rank in range(world):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_run, args=(function, rank, world, port, args, theirs), daemon=False)
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    try:
        return [_receive(end, time.monotonic() + LIMIT) for end in ends]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@functools.cache
def _serve() -> None:
    """Start the process that imports torch once; Python 3.11 does not pass it the import path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    multiprocessing.forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    os.environ.update({} if before is None else {"PYTHONPATH": before})


def _receive(end: Any, until: float) -> Any:
    if not end.poll(max(0.0, until - time.monotonic())):
        return f"no answer in {LIMIT} s"
    try:
        return end.recv()
    except EOFError:
        return "died"


def _run(function: Callable, rank: int, world: int, port: int, args: tuple, end: Any) -> None:
    import torch

    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        end.send(function(*args))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}")
