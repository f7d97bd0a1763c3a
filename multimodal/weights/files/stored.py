"""Number types of stored weights. "int8" is what compressed-tensors and vLLM call "int-quantized", symmetric and by
groups: each row of a matrix as 8-bit integers, `NAME`, with a scale for every `GROUP` numbers or fewer, `NAME_scale`
[rows, groups]; [rows] is one group each.

The rows of a convolution, and of any tensor of more than two axes, are those of [out, rest]. Vectors, and matrices with
rows shorter than `LEAST_GROUP`, are stored in float16. Scales are bfloat16, which has float32's range; with its 8
significant bits, the products of 8-bit integers and scales are exact in float32. Of the scales that give the largest
magnitude of a group a level of `LEAST_TOP` to 127, the one with the least squared error is kept; groups and
this choice leave two thirds of the error of one scale a row. What was loaded is stored again without error."""

import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.weights.files.store_options import Store, StoreOptions
from multimodal.weights.table import Tensors, all_finite

GROUP = 32  # numbers at most; their scale takes a sixteenth
LEAST_GROUP = 8  # numbers; in a shorter one the scale takes a fifth or more
LEVELS = 127  # to each side of 0
LEAST_TOP = 96  # level of a group's largest magnitude
SCALE = "_scale"


def to_stored(tensors: Tensors, store: Store, where: str) -> Tensors:
    """Tensors as `store` keeps them. Raises UsageError for another store, CheckpointError for a tensor that is not
    finite, or not in the range of 16 bits."""
    StoreOptions.checked({"store": store})
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            stored[name] = tensor.contiguous()
            continue
        if not all_finite(tensor):
            raise CheckpointError(f"{where}: tensor {name!r} holds values that are not finite")
        if store == "int8" and _has_rows(tensor):
            stored[name], stored[name + SCALE] = quantized(tensor)
            continue
        stored[name] = tensor.to(getattr(torch, "float16" if store == "int8" else store)).contiguous()
        if not all_finite(stored[name]):
            most, kind = tensor.abs().max().item(), stored[name].dtype
            problem = f"holds {most:.6g}, beyond the range of {kind}; the store float32 keeps it"
            raise CheckpointError(f"{where}: tensor {name!r} {problem}")
    return stored


def from_stored(tensors: Tensors, where: str) -> Tensors:
    """Weights of a file that was stored as int8. Raises CheckpointError for a missing or impossible scale."""
    weights: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            scale = _scale(tensors, name, where)
            grouped = tensor.float().view(len(scale), scale[0].numel(), -1)
            weights[name] = grouped.mul_(scale.float().view(*grouped.shape[:2], 1)).view(tensor.shape)
        elif tensors.get(name.removesuffix(SCALE), tensor).dtype != torch.int8:
            weights[name] = tensor
    return weights


def _scale(tensors: Tensors, name: str, where: str) -> Tensor:
    if (scale := tensors.get(name + SCALE)) is None:
        raise CheckpointError(f"{where}: tensor {name + SCALE!r} is missing")
    rows, numbers = len(tensors[name]), tensors[name][0].numel()
    groups = scale.shape[1] if scale.ndim == 2 else 1
    if scale.shape[:1] != (rows,) or scale.ndim > 2 or not groups or numbers % groups or scale.dtype != torch.bfloat16:
        raise CheckpointError(
            f"{where}: tensor {name + SCALE!r}: expected [{rows}, groups] of torch.bfloat16 with groups that divide "
            f"{numbers}, got {list(scale.shape)} of {scale.dtype}"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise CheckpointError(f"{where}: tensor {name + SCALE!r} holds scales that are not positive and finite")
    return scale


def quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers of the tensor's shape, and the scale of each group [rows, groups]."""
    rows = tensor.detach().float().flatten(1).contiguous()
    groups = rows.view(len(rows), _groups(rows.shape[1]), -1)
    largest = groups.abs().amax(2, keepdim=True)
    best, least = _scales(largest, LEVELS), torch.full_like(largest, torch.inf)
    for top in range(LEVELS, LEAST_TOP - 1, -1):
        scale = _scales(largest, top)
        error = (_levels(groups, scale).mul_(scale) - groups).square_().sum(2, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return _levels(groups, best).to(torch.int8).view(tensor.shape), best.squeeze(2).to(torch.bfloat16)


def _groups(numbers: int) -> int:
    """Number of groups in a row: the fewest equal ones of at most `GROUP` numbers, or one where they would be small."""
    sizes = [size for size in range(LEAST_GROUP, GROUP + 1) if numbers % size == 0]
    return numbers // sizes[-1] if sizes else 1


def _scales(largest: Tensor, top: int) -> Tensor:
    scale = (largest / top).to(torch.bfloat16).float()
    return scale.masked_fill(scale == 0, 1)  # a group of zeros


def _levels(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round_().clamp_(-LEVELS, LEVELS)


def _has_rows(tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.shape[0] > 0 and tensor[0].numel() >= LEAST_GROUP
