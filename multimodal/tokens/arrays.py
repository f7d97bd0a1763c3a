"""NumPy array of a tensor's values."""

import numpy as np
import torch
from torch import Tensor

from multimodal.errors import MultimodalError


def numpy_of(tensor: Tensor, name: str, error: type[MultimodalError]) -> np.ndarray:
    """Copy to the host if need be; bfloat16 becomes float32. Raises `error` for a tensor that NumPy has no form for:
    sparse, quantized, or on the meta device."""
    try:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    except (TypeError, RuntimeError) as cause:  # NotImplementedError, of the meta device, is a RuntimeError
        kind = "" if tensor.layout == torch.strided else f"{tensor.layout} "
        problem = f"{name}: expected a dense tensor of numbers (got {kind}{tensor.dtype} on {tensor.device})"
        raise error(problem) from cause
