"""States of a run whose weights are in shards: each process writes and reads its own part (torch's distributed
checkpoint, as safetensors files beside `state.pt`), and any number of processes can go on from them."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from multimodal.errors import TrainingError
from multimodal.train.optim import Average
from multimodal.train.state import partial_folder, saving

if TYPE_CHECKING:
    import multimodal.train.loop

SHARDS = "shards"


def save_shards(loop: "multimodal.train.loop.Loop", state: dict[str, Any]) -> None:
    """Called by all processes; the first one completes the state. Raises TrainingError where it cannot be written."""
    part, processes = partial_folder(loop.states, loop.done), loop.processes
    rest = state | {"model": None, "optimizers": None, "average": None}
    if loop.average:
        rest["average"] = {"updates": int(loop.average.updates)}
    with contextlib.ExitStack() as stack:
        processes.on_main(lambda: stack.enter_context(saving(loop.states, loop.done, loop.settings.keep)))
        writer = dcp.HuggingFaceStorageWriter(str(part / SHARDS), save_distributed=True)
        try:
            dcp.save(_tensors(loop), storage_writer=writer, process_group=processes.control)
        except CheckpointException as error:
            raise TrainingError(
                f"{loop.states}: step {loop.done}: the state cannot be saved: {_cause(error)}"
            ) from None
        if processes.main:
            torch.save(rest, part / "state.pt")


def load_shards(loop: "multimodal.train.loop.Loop", path: Path) -> None:
    """Fills model, optimizers and average of this run, in shards or whole, from the state at `path`. Raises
    ValueError where it does not fit them."""
    reader = dcp.HuggingFaceStorageReader(str(path / SHARDS))
    try:
        known = reader.read_metadata().state_dict_metadata
    except Exception as error:  # PyTorch's reader checks nothing that it reads
        raise ValueError(f"{path / SHARDS}: {error!r:.200}") from None
    if any(name.startswith("optimizers.") for name in known):
        _begin(loop)
    tensors = _tensors(loop)
    if loop.average and not any(name.startswith("average.") for name in known):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("average.")}
    for name, tensor in tensors.items():
        if name not in known or known[name].size != tensor.shape:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} here, {known[name].size if name in known else 'not'} saved"
            )
    group = loop.processes.control
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise ValueError(_cause(error)) from None
    if loop.average and not any(name.startswith("average.") for name in known):
        loop.average = Average(loop.objective.model, loop.settings.optim.average)


def _tensors(loop: "multimodal.train.loop.Loop") -> dict[str, Tensor]:
    """By name, the same storage: weights, average and states of the optimizers."""
    found = {f"model.{name}": tensor for name, tensor in loop.objective.model.state_dict().items()}
    if loop.average:
        found |= {f"average.{name}": tensor for name, tensor in loop.average.weights.items()}
    names = {parameter: name for name, parameter in loop.objective.model.named_parameters()}
    for number, optimizer in enumerate(loop.optimizers):
        for parameter, state in optimizer.state.items():
            found |= {f"optimizers.{number}.{key}.{names[parameter]}": value for key, value in state.items()}
    return {name: tensor if tensor.ndim else tensor.view(1) for name, tensor in found.items()}


def _begin(loop: "multimodal.train.loop.Loop") -> None:
    """Makes the states of the optimizers, by a step whose effect is overwritten."""
    for parameter in loop.objective.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in loop.optimizers:
        optimizer.step()
    loop.objective.zero_grad()


def _cause(error: CheckpointException) -> str:
    failure = next(iter(error.failures.values()))[0]
    return " ".join(str(failure).split())
