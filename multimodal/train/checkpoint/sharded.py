"""Sharded training states: each process writes and reads its own part with torch's distributed checkpoint, as
safetensors files beside `state.pt`. Any number of processes can resume from them."""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from multimodal.errors import TrainingError, one_line
from multimodal.train.checkpoint.atomic import partial_folder, saving
from multimodal.train.checkpoint.state import TrainingState
from multimodal.train.distributed.processes import Processes

SHARDS = "shards"


def save_shards(folder: Path, step: int, state: dict[str, Any], tensors: dict[str, Tensor], processes: Processes,
                keep: int) -> None:  # fmt: skip
    """Save `tensors` in shards and the rest of `state` in one file. All processes call this. Raises TrainingError."""
    part = partial_folder(folder, step)
    average = state["average"] and {"updates": state["average"]["updates"]}
    rest = state | {"model": None, "optimizers": None, "average": average}
    with contextlib.ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(saving(folder, step, keep)))
        writer = dcp.HuggingFaceStorageWriter(str(part / SHARDS), save_distributed=True)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=processes.control)
        except CheckpointException as error:
            raise TrainingError(f"{folder}: step {step}: the state cannot be saved: {_cause(error)}") from None
        if processes.main:
            torch.save(rest, part / "state.pt")


def load_shards(path: Path, rest: dict[str, Any], state: TrainingState, processes: Processes) -> None:
    """Fill `state`, sharded or not, from the folder `path` and the contents `rest` of its `state.pt`. Raises ValueError
    if it does not fit."""
    reader = dcp.HuggingFaceStorageReader(str(path / SHARDS))
    try:
        known = reader.read_metadata().state_dict_metadata
    except Exception as error:  # PyTorch's reader checks nothing
        raise ValueError(f"{path / SHARDS}: {error!r:.200}") from None
    if any(name.startswith("optimizers.") for name in known):
        state.begin_optimizers()
    averaged = any(name.startswith("average.") for name in known)
    tensors = {name: tensor for name, tensor in state.tensors().items() if averaged or not name.startswith("average.")}
    for name, tensor in tensors.items():
        if name not in known or known[name].size != tensor.shape:
            size = tuple(known[name].size) if name in known else "nothing"
            raise ValueError(f"{name}: expected shape {tuple(tensor.shape)}, saved {size}")
    group = processes.control
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ValueError(_cause(error)) from None
    if state.average and not averaged:
        state.restart_average()
    if state.average and rest["average"]:
        state.average.updates = rest["average"]["updates"]
    state.load_scale(rest)


def _cause(error: CheckpointException) -> str:
    failure = next(iter(error.failures.values()))[0]
    return one_line(failure)
