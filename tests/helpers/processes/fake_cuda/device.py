"""Fake tensors of device `cuda`, and a record of what would make the host wait for it."""

import math
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import multimodal

from .autograd import backward

ROOT = Path(multimodal.__file__).parent
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
_real = {"empty": torch.empty, "tolist": Tensor.tolist}
_current: list["Waits"] = []


def where() -> str:
    """The innermost two functions of the package."""
    own = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT))]
    return " < ".join(f"{Path(f.filename).relative_to(ROOT)} {f.name}" for f in reversed(own[-2:])) or "outside"


def on_cuda(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


class Waits(TorchDispatchMode):
    """Counts, by cause and place, what reads the device from the host or sends a tensor made on the host: a wait, and
    forbidden while a CUDA graph is captured."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.launches = 0  # operations on the device that are more than views

    def note(self, cause: str) -> None:
        self.found[f"{cause}: {where()}"] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, first = kwargs or {}, args[0] if args else None
        self.launches += function.namespace == "aten" and on_cuda(first) and not function.is_view
        if function is aten._local_scalar_dense.default:
            return self._scalar(function, first)
        if function is aten.equal.default and on_cuda(first):
            self.note("read (equal)")
            return True
        if function is aten.nonzero.default:
            if on_cuda(first):
                self.note("shape read (nonzero)")
            return torch.zeros(first.numel(), max(first.ndim, 1), dtype=torch.long, device=first.device)
        if function is aten.masked_select.default:
            self.note("shape read (masked_select)")
            return first.flatten()
        if function in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default,
                        aten._index_put_impl_.default):  # fmt: skip
            args = (first, self._indices(first, args[1]), *args[2:])
        if function is aten.exponential_.default:
            kwargs.pop("generator", None)  # which has no meaning for fake tensors
        self._copies(function, args, kwargs)
        return function(*args, **kwargs)

    def _scalar(self, function, x: Tensor) -> bool | int | float:
        if on_cuda(x):
            self.note("read (item, bool)")
        else:
            try:
                return function(x)
            except Exception:  # a fake tensor of the host has no value
                pass
        return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 0

    def _indices(self, x: Tensor, indices: list[Tensor | None]) -> list[Tensor | None]:
        """A mask selects all: fake tensors have no shapes that depend on values."""
        found: list[Tensor | None] = []
        for one in indices:
            if isinstance(one, Tensor) and on_cuda(x) and not on_cuda(one):
                self.note("index made on the host")
            if isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8):
                if on_cuda(one):
                    self.note("shape read (mask)")
                found += [torch.zeros(one.numel(), dtype=torch.long, device=x.device) for _ in range(one.ndim)]
            else:
                found.append(one)
        return found

    def _copies(self, function, args: tuple, kwargs: dict) -> None:
        if kwargs.get("non_blocking"):
            return
        if function is aten._to_copy.default:
            to = torch.device(kwargs.get("device") or args[0].device)
            if on_cuda(args[0]) and to.type == "cpu":
                self.note("copied to the host")
            elif not on_cuda(args[0]) and to.type == "cuda":
                self.note("made on the host")
        elif function is aten.copy_.default and not (len(args) > 2 and args[2]):
            if on_cuda(args[0]) and not on_cuda(args[1]) and args[1].ndim:
                self.note("made on the host")
            elif on_cuda(args[1]) and not on_cuda(args[0]):
                self.note("copied to the host")


def waits() -> Waits:
    """Record of the current `pretended_gpu`."""
    return _current[-1]


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention of plain operations, which checks types and devices as the kernels do."""
    assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
    assert attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype), (attn_mask.dtype, query.dtype)
    for one in (key, value, attn_mask):
        assert one is None or one.device == query.device, (one.device, query.device)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1).to(value.dtype) @ value


def _ctc(log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False):
    """torch's kernel reads lengths that are on the device."""
    assert log_probs.device == targets.device, (log_probs.device, targets.device)
    for name, one in (("input", input_lengths), ("target", target_lengths)):
        if on_cuda(one):
            waits().note(f"ctc_loss reads {name} lengths")
    losses = -log_probs.mean((0, 2))
    return losses.sum() if reduction != "none" else losses


def _tolist(x: Tensor) -> Any:
    if on_cuda(x):
        waits().note("read (tolist)")
    if not isinstance(x, FakeTensor):
        return _real["tolist"](x)
    one: Any = True if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 0
    filled = lambda shape: [filled(shape[1:]) for _ in range(shape[0])] if shape else one
    return filled(tuple(x.shape))


def _moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`Module.to` for fake tensors; ties stay."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, own in table.items():
                if own is not None and id(own) not in made:
                    kind = dtype if dtype is not None and own.is_floating_point() else own.dtype
                    x = _real["empty"](own.shape, dtype=kind, device=own.device if device is None else device)
                    made[id(own)] = nn.Parameter(x, own.requires_grad) if isinstance(own, nn.Parameter) else x
                table[name] = None if own is None else made[id(own)]
    return module


class _Event:
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def no_inference_mode() -> None:
    """Replace `torch.inference_mode`, under which dispatch modes see `to` and `item` whole. Call before the package is
    imported."""
    torch.inference_mode = lambda mode=True: (
        torch.no_grad()(mode) if callable(mode) else torch.no_grad() if mode else nullcontext()
    )


@contextmanager
def pretended_gpu() -> Iterator[Waits]:
    """New tensors are fake; modules and batches may move to `cuda`. Yields the record of waits."""
    from torch.amp import autocast_mode, grad_scaler

    from multimodal.blocks import sdpa
    from multimodal.inference import prepare
    from multimodal.train import settings

    found = Waits()
    changes = [
        (autocast_mode, "is_autocast_available", lambda *_: True), (torch.cuda, "Event", _Event),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True), (Tensor, "backward", backward),
        (Tensor, "tolist", _tolist), (FakeTensor, "tolist", _tolist), (F, "ctc_loss", _ctc),
        (F, "scaled_dot_product_attention", _attention), (nn.Module, "to", _moved),
        (torch, "empty", lambda *args, pin_memory=False, **named: _real["empty"](*args, **named)),
        (sdpa, "has_cudnn_attention", lambda device: True), (settings, "check_device", lambda *_: None),
        (prepare, "usable_device", lambda name: CUDA if torch.device(name).type == "cuda" else torch.device(name)),
        (grad_scaler.torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
    ]  # fmt: skip
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        _current.append(found)
        stack.callback(_current.pop)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(found)
        yield found
