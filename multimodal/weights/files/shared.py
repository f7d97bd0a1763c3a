"""Parts of a checkpoint that are those of a shipped model: frozen encoders, stored once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from multimodal.errors import CheckpointError
from multimodal.system.assets import shipped


@dataclass(frozen=True)
class SharedPart:
    """`part`: module of the checkpoint's model; `module`: the one of the shipped `model` that it equals."""

    part: str
    model: str
    module: str


def shipped_folder(one: SharedPart, where: str) -> Path:
    """Raises CheckpointError for a model that does not ship."""
    if (folder := shipped().get(one.model)) is None:
        known = ", ".join(shipped())
        raise CheckpointError(f"{where}: {one.part} is that of {one.model!r}, which does not ship (known: {known})")
    return folder


def shared_tensors(
    parts: Sequence[SharedPart], own: Mapping[str, Tensor], load: Callable[[Path], nn.Module], where: str
) -> dict[str, Tensor]:
    """Tensors of the shared parts by their names in the checkpoint's model, which has `own`; it may lack some, such as
    later layers. Raises CheckpointError."""
    found: dict[str, Tensor] = {}
    for one in parts:
        try:
            module = load(shipped_folder(one, where)).get_submodule(one.module)
        except AttributeError:
            raise CheckpointError(f"{where}: {one.model} has no part {one.module!r}") from None
        tensors = {f"{one.part}.{name}": tensor for name, tensor in module.state_dict().items()}
        found |= {name: tensor for name, tensor in tensors.items() if name in own}
    return found


def own_tensors(state: Mapping[str, Tensor], shared: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors that are not shared. Raises CheckpointError for a shared one that differs."""
    for name, tensor in shared.items():
        if not torch.equal(state[name].cpu(), tensor):
            cause = f"{name} differs from that of the shipped model, so it cannot be shared"
            raise CheckpointError(f"{where}: {cause}: a checkpoint with shared=() stores it")
    return {name: tensor for name, tensor in state.items() if name not in shared}
