"""Base classes of prepared models' modules, and the mode that tasks run them in."""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import is_dataclass
from types import FunctionType, NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._contextlib import _DecoratorContextManager

from multimodal.errors import UsageError


class inference_mode(_DecoratorContextManager):  # noqa: N801 - as torch's
    """`torch.inference_mode` without a caller's autocast: prepared weights have the types of `compute_type`, and
    results must not depend on where a task is called."""

    def __enter__(self) -> None:
        self._modes = contextlib.ExitStack()
        self._modes.enter_context(torch.inference_mode())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self._modes.enter_context(torch.autocast(kind, enabled=False))

    def __exit__(self, *error: Any) -> None:
        self._modes.close()


class Frozen(nn.Module):
    """Inference-only module that PyTorch cannot move, cast, save, load or copy.

    Its weights lie in `tensors`, outside of the parameters, so those operations would act on the rest of the model
    alone; they raise UsageError instead."""

    tensors: tuple[Tensor | None, ...]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "a model prepared for inference is frozen: move, cast, save, load or copy the original and prepare that"
        )

    _apply = _save_to_state_dict = _load_from_state_dict = __reduce_ex__ = __deepcopy__ = _refuse


class Replacement(nn.Module):
    """Takes over the settings, parts and hooks of `module`, which must not be used afterwards."""

    def __init__(self, module: nn.Module):
        nn.Module.__init__(self)
        self.__dict__.update(module.__dict__)


SHARED = (NoneType, bool, int, float, str, torch.dtype, torch.device, FunctionType)  # values that copies may share


def copy_module(model: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    """A copy with `tensors`, by the id of the original, in place of its own. As `copy.deepcopy`, in a third of the
    time: a module has 15 tables, most of them empty."""
    parts = [part for part in model.modules() if not hasattr(part, "__deepcopy__")]
    memo: dict[int, Any] = tensors | {id(part): part.__new__(type(part)) for part in parts}
    for part in parts:
        memo[id(part)].__dict__.update({name: _copied(value, memo) for name, value in part.__dict__.items()})
    return copy.deepcopy(model, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, SHARED) or is_dataclass(value):  # configurations are frozen
        return value
    if isinstance(value, OrderedDict):  # of hooks, which may record what their owner reads
        return value.copy()
    if isinstance(value, Tensor) and not value.is_leaf:  # a pruned weight, which a hook computes again
        return value.detach().clone()
    if type(value) is dict:
        return {name: None if part is None else copy.deepcopy(part, memo) for name, part in value.items()}
    empty = isinstance(value, dict | set) and not value
    return type(value)() if empty else copy.deepcopy(value, memo)


def replace_modules(root: nn.Module, choose: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Put `choose(module)` in the place of every module below `root`; return `choose(root)`."""
    for parent in reversed(list(root.modules())):  # parts before the whole
        for name, child in parent.named_children():
            if (chosen := choose(child)) is not child:
                setattr(parent, name, chosen)
    return choose(root)
