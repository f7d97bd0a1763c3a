"""Choice of PyTorch's attention kernels."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel

ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
VARIED = ORDER[1:]
SHORT = 160  # positions up to which matrix products train faster than fused attention on a CPU, in bfloat16


def preferred_kernels(x: Tensor, steady: bool = True) -> AbstractContextManager:
    """Context for attention over `x` [B T D]. `steady`: shapes hardly change between calls, as in an image tower.

    On a GPU steady shapes prefer cuDNN's kernels. cuDNN plans every new shape, 138 ms on an H200; shapes that vary do
    without, also where PyTorch would take it first. On a CPU short rows train with matrix products in bfloat16. No
    effect where the caller has disabled kernels, or during compilation."""
    if torch.compiler.is_compiling() or not all_kernels_enabled():
        return nullcontext()
    if x.device.type == "cuda":
        steady = steady and has_cudnn_attention(x.device)
        return sdpa_kernel(ORDER, set_priority=True) if steady else sdpa_kernel(VARIED)
    half = x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    if half and torch.is_grad_enabled() and x.shape[1] <= SHORT:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


def recompute_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts for `torch.utils.checkpoint` that recompute with the same kernels, since others save other tensors for
    backward."""
    return nullcontext(), _Again(_cur_sdpa_kernel_backends(with_priority=True))


class _Again(ExitStack):
    """Unlike a `contextlib` generator, can be entered any number of times."""

    def __init__(self, backends: list[SDPBackend]):
        super().__init__()
        self.backends = backends

    def __enter__(self) -> "_Again":
        self.enter_context(sdpa_kernel(self.backends, set_priority=True))
        return super().__enter__()


def all_kernels_enabled() -> bool:
    """True as PyTorch starts: no kernel of SDPA has been turned off."""
    kinds = torch.backends.cuda
    allowed = (kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled())
    return all(allowed) and kinds.cudnn_sdp_enabled()


@cache
def has_cudnn_attention(device: torch.device) -> bool:
    """Try cuDNN once, forward and backward, at the length of a ViT at 224 pixels."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            query = torch.ones(1, 2, 197, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                if not can_use_cudnn_attention(SDPAParams(query, query, query, None, 0.0, False, False)):
                    return False  # trying would warn of each kernel that does not apply
                F.scaled_dot_product_attention(query, query, query).sum().backward()
            return bool(query.grad.isfinite().all())
    except RuntimeError:
        return False
