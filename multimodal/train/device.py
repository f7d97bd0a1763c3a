"""Device placement, determinism, and blocks that are compiled or recomputed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.blocks.conformer import ConformerBlock
from multimodal.blocks.subsample import Subsample
from multimodal.data.batching import map_tensors
from multimodal.data.loader import finished
from multimodal.errors import UsageError
from multimodal.train.losses import compile_loss

# The compiler would lay out everything around a convolution with its channels last, with strides of the first length
# (torch 2.11, on a CPU): the next length ends with an AssertionError.
STEADY = {"layout_optimization": False}


@contextlib.contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Use deterministic kernels alone inside the block. Raises UsageError for an operation that has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first product
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise UsageError(
            f"is not possible: {str(error).split()[0]} has no deterministic kernel", argument="deterministic"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Let a GPU round the factors of float32 products to 10 bits inside the block; autocast's have 7."""
    before = torch.get_float32_matmul_precision()
    if enabled:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_device(device: str, precision: str, compiled: bool) -> None:
    """Raises UsageError for what this machine does not support."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"{device}: no such device (cpu, cuda, cuda:1 ...)", argument="device") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{device}: torch finds no GPU", argument="device")
    if precision == "float16" and kind != "cuda":
        raise UsageError(f"float16: needs a GPU (device is {device})", argument="precision")
    if compiled and kind == "cpu":
        from torch._inductor.config import cpp  # slow to import

        compilers = [name for name in (cpp.cxx if isinstance(cpp.cxx, tuple) else (cpp.cxx,)) if name]
        if not any(map(shutil.which, compilers)):
            raise UsageError(f"needs a C++ compiler on a CPU, found none of {', '.join(compilers)}", argument="compile")


def moved(batch: Any, device: str | torch.device, floating: torch.dtype | None = None) -> Any:
    """Move a batch's tensors to `device` and finish a `Deferred` one there; tensors of a floating type become
    `floating`, if given."""
    batch = map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))  # waits unless pinned
    with torch.no_grad():
        batch = finished(batch)
    return map_tensors(batch, lambda x: x.to(floating) if x.is_floating_point() else x) if floating else batch


def sizes(model: nn.Module) -> tuple[int, int]:
    """Count all parameters, and those that are trained."""
    return sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters() if p.requires_grad)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of all stacks and encoders: members of module lists named `blocks`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.split(".")[-1] == "blocks":
            yield from module


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place: blocks are alike and most of the work, and parameter names stay. Compile a stem
    that subsamples speech, whose maps are large, and on a GPU the loss over a vocabulary. Raises UsageError for a model
    without blocks."""
    inner = list(blocks(model))
    if not inner:
        raise UsageError("needs a model with blocks", argument="compile")
    # each drop path rate makes a variant of a block
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(inner))
    for part in [*inner, *(module for module in model.modules() if isinstance(module, Subsample))]:
        part.compile(options=STEADY if isinstance(part, ConformerBlock) else None)
    compile_loss()


def recompute_blocks(model: nn.Module) -> None:
    """Recompute the blocks' activations in backward (Chen et al. 2016). Raises UsageError for a model without such
    blocks, or with batch norms in them, which would count each batch twice."""
    if any(running_statistics(block) for block in blocks(model)):
        raise UsageError(
            "is not possible with batch norm in the blocks, which would count each batch twice",
            argument="checkpointing",
        )
    able = [module for module in model.modules() if hasattr(module, "checkpointing")]
    if not able:
        raise UsageError("needs a model with blocks to recompute", argument="checkpointing")
    for module in able:
        module.checkpointing = True


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the buffers of batch norms, which a forward changes."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
