"""What depends on the device: where batches lie, in which precision, compiled or recomputed blocks."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from multimodal.errors import UsageError
from multimodal.train.losses import compile_loss

Result = TypeVar("Result")

# dense bfloat16 matrix FLOP/s without sparsity, from the makers' data sheets
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12}


def peak_flops() -> float | None:
    """Of the current GPU; None on a CPU or a GPU that is not listed."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def counted(function: Callable[[], Result]) -> tuple[Result, int]:
    """What `function()` gives, and how many floating-point operations its matrix products, convolutions and attention
    took, forward and backward. Compiled blocks run uncompiled for it."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def check_device(device: str, precision: str, compiled: bool) -> None:
    """Raises UsageError where this machine cannot train so."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"--device {device}: no such device (cpu, cuda, cuda:1 ...)") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no GPU here")
    if precision == "float16" and kind != "cuda":
        raise UsageError(f"--precision float16: needs a GPU, not --device {device}")
    if compiled and kind == "cpu":
        from torch._inductor.config import cpp

        compilers = [name for name in (cpp.cxx if isinstance(cpp.cxx, tuple) else (cpp.cxx,)) if name]
        if not any(map(shutil.which, compilers)):
            raise UsageError(f"--compile: needs a C++ compiler on a CPU, none of {', '.join(compilers)} is there")


def moved(batch: Any, device: str | torch.device, floating: torch.dtype | None = None) -> Any:
    """The batch with its tensors on `device`, those of a floating type as `floating` where that is given: tensors
    inside of dataclasses, named tuples, lists, tuples and mappings are found."""
    if isinstance(batch, torch.Tensor):
        batch = batch.to(device, non_blocking=True)  # waits where it is not pinned; the type changes on the device
        return batch.to(floating) if floating and batch.is_floating_point() else batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **{name: moved(value, device, floating) for name, value in values.items()})
    if isinstance(batch, Mapping):
        return {name: moved(value, device, floating) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device, floating) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device, floating) for value in batch)
    return batch


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks of all stacks and encoders: members of lists that are named `blocks`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "blocks":
            yield from module


def compile_blocks(model: nn.Module) -> None:
    """Blocks are compiled in place, one by one, since they are alike and most of the work; names of parameters stay.
    On a GPU the loss over a vocabulary, which is most of the rest, is compiled too. Raises UsageError where the model
    has no blocks."""
    inner = list(blocks(model))
    if not inner:
        raise UsageError("--compile: the model has no blocks")
    # each rate of drop path makes a variant of a block
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(inner))
    for block in inner:
        block.compile()
    compile_loss()


def recompute_blocks(model: nn.Module) -> None:
    """Activations inside blocks are computed again in backward (Chen et al. 2016) instead of kept. Raises UsageError
    where the model has no such blocks, or batch norms in them, which would count each batch twice."""
    if any(running_statistics(block) for block in blocks(model)):
        raise UsageError("--checkpointing: batch norms in the blocks would count each batch twice")
    able = [module for module in model.modules() if hasattr(module, "checkpointing")]
    if not able:
        raise UsageError("--checkpointing: the model has no blocks that can be computed again")
    for module in able:
        module.checkpointing = True


def running_statistics(model: nn.Module) -> list[torch.Tensor]:
    """Of batch norms: buffers that a forward changes."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
