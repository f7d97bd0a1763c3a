"""Changes to a known model before it is trained: frozen parts, other dropout, and low-rank adapters (LoRA, Hu et al.
2022) through peft."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from multimodal.errors import UsageError, demand
from multimodal.models.text_config import TextConfig
from multimodal.system.options import Natural, PositiveFloat, Rate, check_limits
from multimodal.weights.files.shared import SharedPart


@dataclass(frozen=True)
class LoraSettings:
    freeze: tuple[str, ...] = ()  # parts to freeze, by module path such as `encoder.blocks.0`; `all`: all but new parts
    lora_rank: Natural = 0  # of adapters on the blocks' linear layers, trained with new parts alone; 0: no adapters
    lora_alpha: PositiveFloat = 16.0  # adapters are scaled by this over the rank
    lora_dropout: Rate = 0.0
    lora_targets: tuple[str, ...] = ("query", "key", "value", "out", "up", "gate", "down")  # layers with adapters

    def __post_init__(self):
        check_limits(self)


def adapt(model: nn.Module, settings: LoraSettings, fresh: Sequence[str] = ()) -> None:
    """Freeze parts and add adapters, in place. `fresh`: new parts, trained in full beside adapters.

    Adapters are drawn from torch's global generator. Raises UsageError for an unknown part, a target that no block has,
    or settings that leave nothing to train."""
    parts = settings.freeze
    if "all" in parts:
        parts = [name for name, _ in model.named_parameters() if not _inside(name, fresh)]
    freeze(model, parts)
    if settings.lora_rank:
        _add_lora(model, settings, parts, fresh)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"{' '.join(settings.freeze)}: leaves nothing to train", argument="freeze")


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Freeze parameters under these module paths; batch norms there use and keep their statistics. Dropout stays on.

    Raises UsageError for an unknown path."""
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if name]
    for part in parts:
        if part not in known:
            near = difflib.get_close_matches(part, known, n=3, cutoff=0.5) or [
                name for name, _ in model.named_children()
            ]
            raise UsageError(f"{part}: no part of this model (near: {', '.join(near)})", argument="freeze")
    for name, parameter in model.named_parameters():
        if _inside(name, parts):
            parameter.requires_grad = False
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and _inside(name, parts):
            module.register_forward_pre_hook(_still)


def frozen(shared: Iterable[SharedPart], model: nn.Module) -> tuple[SharedPart, ...]:
    """The shared parts of a model that training leaves as they are."""
    return tuple(one for one in shared if not any(p.requires_grad for p in model.get_submodule(one.part).parameters()))


def with_rates(model: nn.Module, rates: Mapping[str, float | None]) -> nn.Module:
    """Return a model with the same weights and other rates of dropout or drop path in its config, by their places, such
    as `encoder.stack.block.dropout`. None, or a part that the model lacks, leaves it as it is."""
    config = model.config
    for place, rate in rates.items():
        if rate is not None:
            demand(place.rpartition(".")[2], rate, 0 <= rate < 1, "0 to under 1")
            config = _with_rate(config, place.split("."), rate)
    if config == model.config:
        return model
    made = type(model)(config)
    made.load_state_dict(model.state_dict())
    return made.train(model.training)


def _with_rate(config: Any, place: Sequence[str], rate: float) -> Any:
    name, *inner = place
    if config is None:
        return None
    return replace(config, **{name: _with_rate(getattr(config, name), inner, rate) if inner else rate})


def text_sizes(config: TextConfig) -> dict[str, int]:
    attention = config.stack.block.attention
    own = {"layers": config.stack.layers, "context": config.context}
    return {"width": attention.width, "heads": attention.heads} | own


def keep_sizes(init: str, own: Mapping[str, Any], given: Any, default: Any) -> None:
    """Raise UsageError for a size that was `given`, since it is not the default, where the model of `init` has its
    `own`."""
    for name, size in own.items():
        if (asked := getattr(given, name)) not in (getattr(default, name), size):
            raise UsageError(f"{asked}: {init} has {size}, which it keeps", argument=name)


def _inside(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def _still(module: nn.Module, args: Any) -> None:
    module.eval()  # the loop puts the whole model into train mode before each step


def _add_lora(model: nn.Module, s: LoraSettings, still: Sequence[str], fresh: Sequence[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inner = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".blocks." in f".{n}"]
    for target in s.lora_targets:
        if s.lora_targets != LoraSettings.lora_targets and not any(n.endswith(f".{target}") for n in inner):
            has = ", ".join(dict.fromkeys(n.rpartition(".")[2] for n in inner))
            raise UsageError(
                f"{target}: no linear layer of a block has this name (they are {has})", argument="lora_targets"
            )
    chosen = [n for n in inner if n.rpartition(".")[2] in s.lora_targets and not _inside(f"{n}.weight", still)]
    if not chosen:
        raise UsageError(f"{s.lora_rank}: no layer left for an adapter", argument="lora_rank")
    learning = [n for n, p in model.named_parameters() if p.requires_grad and _inside(n, fresh)]
    config = LoraConfig(r=s.lora_rank, lora_alpha=s.lora_alpha, lora_dropout=s.lora_dropout, target_modules=chosen)
    inject_adapter_in_model(config, model)
    for name in learning:  # peft freezes everything else
        model.get_parameter(name).requires_grad = True


def adapters(model: nn.Module) -> dict[str, list[str]]:
    """Return the rank, scale and layers of a model's adapters, and the names of the trained parameters, which states of
    optimizers lack, as part of the meaning of a training state."""
    trained = {"trained parameters": [name for name, p in model.named_parameters() if p.requires_grad]}
    found = next(
        (vars(module)["peft_config"]["default"] for module in model.modules() if "peft_config" in vars(module)), None
    )
    if found is None:
        return {"LoRA settings": ["none"]} | trained
    layers = sorted({name.rpartition(".")[2] for name in found.target_modules})
    return {"LoRA settings": [f"rank {found.r} and alpha {found.lora_alpha:g} on {' '.join(layers)}"]} | trained


def merge(model: nn.Module) -> nn.Module:
    """Merge adapters into the weights, in place, and return the plain model."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge(safe_merge=True)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())
    for module in model.modules():
        vars(module).pop("peft_config", None)
    return model.requires_grad_(True)
