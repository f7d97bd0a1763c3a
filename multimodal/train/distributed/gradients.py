"""Gradients of several processes: exchanged (DDP), or with weights and optimizer in shards (FSDP2)."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from multimodal.errors import TrainingError, UsageError
from multimodal.train.device import blocks
from multimodal.train.distributed.processes import Processes
from multimodal.train.objective import Objective


class Parallel:
    """`module(batch)` is the objective's forward on one process of several. The gradient is the mean over them.

    With `shard`, each process keeps a part of each weight, gradient and state of the optimizer, and sees a block whole
    while it computes it (Zhao et al. 2023). Numbers, such as CLIP's scale, stay whole everywhere."""

    def __init__(self, objective: Objective, processes: Processes, shard: bool = False):
        self.objective, self.processes, self.shard = objective, processes, shard
        self.module: nn.Module = objective
        self.whole: list[nn.Parameter] = []  # parameters that are not in shards
        self.fresh = True
        if shard:
            self._shard()
        elif processes.world > 1:
            self.module = DistributedDataParallel(
                objective, process_group=processes.group, broadcast_buffers=False, gradient_as_bucket_view=True,
                find_unused_parameters=objective.partly,
            )  # fmt: skip

    def _shard(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        group = self.processes.group
        if group is None:
            raise UsageError("--shard: start the recipe with torchrun, on one process or more")
        self.whole = [p for p in self.objective.parameters() if p.ndim == 0]
        for tensor in self.objective.state_dict().values():
            dist.broadcast(tensor, 0, group=group)
        mesh = DeviceMesh.from_group(group, self.processes.device.type)
        for block in dict.fromkeys(blocks(self.objective)):
            fully_shard(block, mesh=mesh)
        fully_shard(self.objective, mesh=mesh, ignored_params=set(self.whole))

    def last(self, yes: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch. In shards, the gradient of each is exchanged, since the sum
        of them would not fit."""
        waits = isinstance(self.module, DistributedDataParallel) and not yes
        return self.module.no_sync() if waits else nullcontext()

    def finish(self) -> None:
        """After the last backward of a step. Raises TrainingError for parameters that had no part in the loss of the
        first step, whose gradients would never be exchanged."""
        for parameter in self.whole:
            if parameter.grad is not None:
                parameter.grad = self.processes.total(parameter.grad) / self.processes.world
        if self.fresh and self.processes.world > 1 and not self.objective.partly:
            trained = ((n, p) for n, p in self.objective.named_parameters() if p.requires_grad)
            without = [name for name, parameter in trained if parameter.grad is None]
            if without:
                raise TrainingError(f"{len(without)} parameters get no gradient, freeze them: {', '.join(without[:5])}")
        self.fresh = False

    @torch.no_grad()
    def full(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights whole on the CPU of the first process, where they are in shards; called by all processes."""
        found = {}
        for name, tensor in weights.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.processes.main:
                found[name] = whole.cpu()
        return found


def gradients(parameters: Iterable[nn.Parameter]) -> list[list[Tensor]]:
    """Those that there are: whole ones, then those in shards, where there are such."""
    found = [p.grad for p in parameters if p.grad is not None]
    kinds = [[g for g in found if isinstance(g, DTensor) is shards] for shards in (False, True)]
    return [kind for kind in kinds if kind]


def norm(kinds: list[list[Tensor]]) -> Float[Tensor, ""]:
    """Of all gradients together, on their device."""
    norms = [nn.utils.get_total_norm(kind) for kind in kinds]
    norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return norms[0] if len(norms) == 1 else torch.stack([n.float() for n in norms]).norm()
