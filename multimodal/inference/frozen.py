"""Modules whose weights are laid out for one processor."""

from typing import Any, NoReturn

from torch import Tensor, nn

from multimodal.errors import UsageError


class Frozen(nn.Module):
    """A map for inference. Its weights lie in `tensors`, which belong to it alone and are none of the module's
    parameters: PyTorch would move, cast, save, load and copy all of a model but them. Thus it refuses."""

    tensors: tuple[Tensor | None, ...]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "a model prepared for inference is frozen: move, cast, save, load or copy the original and prepare that"
        )

    _apply = _save_to_state_dict = _load_from_state_dict = __reduce_ex__ = __deepcopy__ = _refuse
