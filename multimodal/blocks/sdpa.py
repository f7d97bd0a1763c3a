"""Which of PyTorch's attention kernels are asked for."""

import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SHORT = 160  # positions up to which matrix products train faster on a CPU than its fused attention, in bfloat16


def fitting(x: Tensor, steady: bool = True) -> AbstractContextManager:
    """Around attention over `x` [B T D]. `steady`: shapes hardly change from call to call, as those of a picture tower.

    On a GPU cuDNN's kernels are then asked for first, and the others in turn where it has none. It plans every new
    shape for itself, which takes longer than it saves where lengths vary, so there PyTorch's own order holds. On a CPU
    rows of few positions are trained by matrix products in bfloat16. No change where the caller has ruled some kernels
    out, or inside a function that is being compiled."""
    if torch.compiler.is_compiling() or not unrestricted():
        return nullcontext()
    if x.device.type == "cuda":
        return sdpa_kernel(ORDER, set_priority=True) if steady and cudnn_attends(x.device) else nullcontext()
    half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    if half and torch.is_grad_enabled() and x.shape[1] <= SHORT:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def same_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """For `torch.utils.checkpoint`: what is recomputed asks for the kernels that it was computed with, since others
    keep other tensors for backward."""
    return nullcontext(), _Again(_cur_sdpa_kernel_backends(with_priority=True))


class _Again(ExitStack):
    """May be entered any number of times, as a generator of `contextlib` may not."""

    def __init__(self, backends: list[SDPBackend]):
        super().__init__()
        self.backends = backends

    def __enter__(self) -> "_Again":
        self.enter_context(sdpa_kernel(self.backends, set_priority=True))
        return super().__enter__()


def unrestricted() -> bool:
    kinds = torch.backends.cuda
    allowed = (kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled())
    return all(allowed) and kinds.cudnn_sdp_enabled()


@cache
def cudnn_attends(device: torch.device) -> bool:
    """Tried once, forward and back, at the length of a ViT of 224 pixels."""
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # it says of each kernel why it is not taken
            query = torch.ones(1, 2, 197, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                F.scaled_dot_product_attention(query, query, query).sum().backward()
            return bool(query.grad.isfinite().all())
    except RuntimeError:
        return False
