"""Which parts of a model learn: frozen parts, and low-rank adapters (LoRA, Hu et al. 2022) through peft."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from multimodal.errors import UsageError, demand


@dataclass(frozen=True)
class AdaptSettings:
    freeze: tuple[str, ...] = ()
    """parts that stay as they are, by module path (`image`, `encoder.blocks.0`); `all`: all but new parts"""
    lora_rank: int = 0
    """learn matrices of this rank beside linear layers of the blocks, and else new parts only; 0: no adapters"""
    lora_alpha: float = 16.0
    """the product of the matrices is scaled by this over the rank"""
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ("query", "key", "value", "out", "up", "gate", "down")
    """which linear layers of a block, by their last name"""

    def __post_init__(self):
        demand("lora_rank", self.lora_rank, self.lora_rank >= 0, "0 or more")
        demand("lora_alpha", self.lora_alpha, 0 < self.lora_alpha < math.inf, "a positive number")
        demand("lora_dropout", self.lora_dropout, 0 <= self.lora_dropout < 1, "0 to under 1")


def adapt(model: nn.Module, settings: AdaptSettings, fresh: Sequence[str] = ()) -> None:
    """Freezes and adds adapters, in place. `fresh`: new parts, which learn in full beside adapters.

    Adapters are drawn from torch's global generator. Raises UsageError naming an unknown part, a target that no block
    has, or flags that leave nothing to learn."""
    parts = settings.freeze
    if "all" in parts:
        parts = [name for name, _ in model.named_parameters() if not _inside(name, fresh)]
    freeze(model, parts)
    if settings.lora_rank:
        _add_lora(model, settings, parts, fresh)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"--freeze {' '.join(settings.freeze)}: leaves nothing of the model to learn")


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Nothing under these module paths learns; batch norms there keep their statistics and use them. Dropout stays on.

    Raises UsageError naming an unknown path."""
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    for part in parts:
        if part not in known:
            near = difflib.get_close_matches(part, known, n=3, cutoff=0.5) or [
                name for name, _ in model.named_children()
            ]
            raise UsageError(f"--freeze {part}: no part of this model (near: {', '.join(near)})")
    for name, parameter in model.named_parameters():
        if _inside(name, parts):
            parameter.requires_grad = False
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and _inside(name, parts):
            module.register_forward_pre_hook(_still)


def _inside(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def _still(module: nn.Module, args: Any) -> None:
    module.eval()  # the loop puts the whole model into train mode before each step


def _add_lora(model: nn.Module, s: AdaptSettings, frozen: Sequence[str], fresh: Sequence[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inner = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".blocks." in f".{n}"]
    for target in s.lora_targets:
        if s.lora_targets != AdaptSettings.lora_targets and not any(n.endswith(f".{target}") for n in inner):
            has = ", ".join(dict.fromkeys(n.rpartition(".")[2] for n in inner))
            raise UsageError(f"--lora_targets {target}: no linear layer of a block has this name (they are {has})")
    chosen = [n for n in inner if n.rpartition(".")[2] in s.lora_targets and not _inside(f"{n}.weight", frozen)]
    if not chosen:
        raise UsageError(f"--lora_rank {s.lora_rank}: no layer is left that could have an adapter")
    learning = [n for n, p in model.named_parameters() if p.requires_grad and _inside(n, fresh)]
    config = LoraConfig(r=s.lora_rank, lora_alpha=s.lora_alpha, lora_dropout=s.lora_dropout, target_modules=chosen)
    inject_adapter_in_model(config, model)
    for name in learning:  # peft stops all that is no adapter
        model.get_parameter(name).requires_grad = True


def merge(model: nn.Module) -> nn.Module:
    """The model with its adapters added to the weights, in place: a plain model of ours again."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())
    for module in model.modules():
        vars(module).pop("peft_config", None)
    return model.requires_grad_(True)
