"""NumPy array of an array's or a tensor's values."""

import numpy as np
import torch
from torch import Tensor

from multimodal.errors import MultimodalError


def numpy_of(source: np.ndarray | Tensor, name: str, error: type[MultimodalError]) -> np.ndarray:
    """Copy to the host if need be; bfloat16 becomes float32. Raises `error` for masked values, and for a tensor that
    NumPy has no form for: sparse, quantized, or on the meta device."""
    if isinstance(source, np.ndarray):
        if np.ma.is_masked(source):
            raise error(f"{name}: expected an array without a mask (got {np.ma.count_masked(source)} masked values)")
        return np.asarray(source)
    try:
        tensor = source.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    except (TypeError, RuntimeError) as cause:  # NotImplementedError, of the meta device, is a RuntimeError
        kind = "" if source.layout == torch.strided else f"{source.layout} "
        problem = f"{name}: expected a dense tensor of numbers (got {kind}{source.dtype} on {source.device})"
        raise error(problem) from cause
