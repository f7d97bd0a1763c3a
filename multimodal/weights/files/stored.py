"""Number types of stored weights. "int8" is what compressed-tensors and vLLM call "int-quantized", symmetric and per
channel: each row of a matrix as 8-bit integers, `NAME`, with a scale for each row, `NAME_scale`.

The rows of a convolution, and of any tensor of more than two axes, are those of [out, rest]. Vectors, and matrices with
rows shorter than `LEAST_ROW`, are stored in float16. A scale is the row's largest magnitude / 127 in bfloat16, which
has float32's range; with its 8 significant bits, the products of 8-bit integers and scales are exact in float32. So the
error of a weight is at most half of its row's scale, and what was loaded is stored as the same bytes again."""

import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.weights.files.store_options import Store, StoreOptions
from multimodal.weights.table import Tensors, all_finite

LEAST_ROW = 8  # numbers; in a shorter row the scale takes a fifth or more
LEVELS = 127  # to each side of 0
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
            raise CheckpointError(f"{where}: tensor {name!r} holds {most:.6g}, beyond the range of {kind}")
    return stored


def from_stored(tensors: Tensors, where: str) -> Tensors:
    """Weights of a file that was stored as int8. Raises CheckpointError for a missing or impossible scale."""
    weights: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            scale = _scale(tensors, name, where)
            weights[name] = tensor.float().mul_(scale.float().view(-1, *[1] * (tensor.ndim - 1)))
        elif tensors.get(name.removesuffix(SCALE), tensor).dtype != torch.int8:
            weights[name] = tensor
    return weights


def _scale(tensors: Tensors, name: str, where: str) -> Tensor:
    if (scale := tensors.get(name + SCALE)) is None:
        raise CheckpointError(f"{where}: tensor {name + SCALE!r} is missing")
    expected = tensors[name].shape[:1]
    if scale.shape != expected or scale.dtype != torch.bfloat16:
        raise CheckpointError(
            f"{where}: tensor {name + SCALE!r}: expected {list(expected)} of torch.bfloat16, got {list(scale.shape)} "
            f"of {scale.dtype}"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise CheckpointError(f"{where}: tensor {name + SCALE!r} holds scales that are not positive and finite")
    return scale


def quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers of the tensor's shape, and the scale of each row."""
    rows = tensor.detach().float().flatten(1)
    scale = (rows.abs().amax(1) / LEVELS).to(torch.bfloat16)
    scale[scale == 0] = 1  # a row of zeros
    levels = (rows / scale.float()[:, None]).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return levels.view(tensor.shape), scale


def _has_rows(tensor: Tensor) -> bool:
    return tensor.ndim >= 2 and tensor.shape[0] > 0 and tensor[0].numel() >= LEAST_ROW
