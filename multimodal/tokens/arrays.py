"""Values of arrays and tensors, and content of file objects."""

from typing import Any

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


def content_of(file: Any, error: type[MultimodalError]) -> bytes:
    """Read a file object to its end. Raises `error` for one that cannot be read, or that gives text."""
    name = type(file).__name__
    try:
        data = file.read()
    except UnicodeDecodeError:  # opened as text
        data = ""
    except (OSError, ValueError) as cause:  # ValueError: closed
        raise error(f"<{name}>: cannot be read ({cause})") from None
    if not isinstance(data, bytes):
        raise error(f"<{name}>: expected a file opened in binary mode (got {type(data).__name__})")
    return data
