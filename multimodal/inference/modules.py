"""Base classes of prepared models' modules."""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from multimodal.errors import UsageError


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


def replace_modules(root: nn.Module, choose: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Put `choose(module)` in the place of every module below `root`; return `choose(root)`."""
    for parent in reversed(list(root.modules())):  # parts before the whole
        for name, child in parent.named_children():
            if (chosen := choose(child)) is not child:
                setattr(parent, name, chosen)
    return choose(root)
