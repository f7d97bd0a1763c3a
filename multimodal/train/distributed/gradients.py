"""Data parallel training: averaged gradients (DDP), or sharded weights and optimizer (FSDP2)."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataParallel:
    """Wraps an objective as `module`, whose gradients are averaged over processes.

    With `shard` each process keeps a part of each weight, gradient and optimizer state, and gathers a block while it
    computes it (Zhao et al. 2023); `hybrid`: each machine keeps all parts, and only gradients go between machines
    (HSDP). Scalars, such as CLIP's scale, and the objective's `uneven` modules stay replicated. `gathered`, `reduced`:
    types in which weights and gradients travel; None: their own."""

    def __init__(
        self, objective: Objective, processes: Processes, shard: bool = False, hybrid: bool = False,
        gathered: torch.dtype | None = None, reduced: torch.dtype | None = None,
    ):  # fmt: skip
        self.objective, self.processes, self.hybrid = objective, processes, hybrid
        self.module: nn.Module = objective
        self.whole: list[nn.Parameter] = []  # parameters that are not sharded
        self.fresh = True
        if shard:
            self._shard(gathered, reduced)
        elif processes.world > 1:
            self.module = DistributedDataParallel(
                objective, process_group=processes.group, broadcast_buffers=False, gradient_as_bucket_view=True,
                find_unused_parameters=objective.partly,
            )  # fmt: skip

    def _shard(self, gathered: torch.dtype | None, reduced: torch.dtype | None) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        group = self.processes.group
        if group is None:
            raise UsageError("needs torchrun: start the recipe with it", argument="shard")
        uneven = {p for module in self.objective.uneven for p in module.parameters()}
        if any(p.requires_grad for p in uneven):
            raise UsageError("needs frozen encoders, since not every batch runs them", argument="shard")
        self.objective.even = True
        self.whole = [p for p in self.objective.parameters() if p.ndim == 0]
        for tensor in self.objective.state_dict().values():
            dist.broadcast(tensor, 0, group=group)
        # inputs keep their type: under autocast products cast them, and targets stay exact
        policy = MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=False)
        options = {"mesh": self._mesh(group), "mp_policy": policy}
        for block in dict.fromkeys(blocks(self.objective)):
            if not uneven.issuperset(block.parameters()):
                fully_shard(block, **options)
        fully_shard(self.objective, ignored_params=uneven.union(self.whole), **options)

    def _mesh(self, group: dist.ProcessGroup) -> "DeviceMesh":
        """One dimension of all processes, or two: machines, which hold copies, and the processes of each."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        kind, world = self.processes.device.type, self.processes.world
        if not self.hybrid:
            return DeviceMesh.from_group(group, kind)
        inside = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if world % inside:
            counts = f"{world} in all, {inside} here"
            raise UsageError(f"needs as many processes on each machine (got {counts})", argument="hybrid")
        return init_device_mesh(kind, (world // inside, inside), mesh_dim_names=("machines", "processes"))

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """Context of a micro-batch's forward and backward. Sharded gradients are exchanged after each, since their
        unsharded sum would not fit."""
        waits = isinstance(self.module, DistributedDataParallel) and not last
        return self.module.no_sync() if waits else nullcontext()

    def finish(self) -> None:
        """Finish the last backward of a step. Raises TrainingError for trained parameters without a gradient in the
        first step, which would never be exchanged."""
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
        """Gather sharded weights on the CPU of the first process. All processes call this."""
        gathered = {}
        for name, tensor in weights.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.processes.main:
                gathered[name] = whole.cpu()
        return gathered


def gradients(parameters: Iterable[nn.Parameter]) -> list[list[Tensor]]:
    """Return all gradients, grouped into plain and sharded ones; empty groups are dropped."""
    grads = [p.grad for p in parameters if p.grad is not None]
    groups = [[g for g in grads if isinstance(g, DTensor) is sharded] for sharded in (False, True)]
    return [group for group in groups if group]


def norm(groups: list[list[Tensor]]) -> Float[Tensor, ""]:
    """Return the total norm of all gradients, on their device."""
    norms = [nn.utils.get_total_norm(group) for group in groups]
    norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return norms[0] if len(norms) == 1 else torch.stack([n.float() for n in norms]).norm()
