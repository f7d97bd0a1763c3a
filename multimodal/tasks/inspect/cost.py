"""What a model costs: parameters, operations, the cache of keys and values, and the memory of training."""

from typing import Any

from torch import nn

from multimodal.errors import UsageError
from multimodal.models.speech import SpeechEncoder
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.tasks.inspect.cost_flops import tower_flops
from multimodal.tasks.inspect.cost_memory import (
    FULL,
    HALF,
    Work,
    activation_bytes,
    cache_bytes,
    cast_bytes,
    state_bytes,
)
from multimodal.tasks.inspect.cost_towers import Tower, towers
from multimodal.weights.folder import KINDS, build

SECONDS = 10.0  # of sound, where a model takes any
LONGEST = 10**9  # seconds: 32 years


def counts(model: nn.Module | Any, length: int | None = None, batch: int = 1, seconds: int | float = SECONDS) -> dict:
    """Of a model, or of a configuration, whose weights are never made.

    `length`: tokens of a text (default: the model's context), `seconds` of sound where the model takes any length;
    a picture is of the size of the configuration. `flops`: of the forward pass of one item, for each stack that it runs
    through; training takes three times as many. `cache_bytes`: of a batch. `training_bytes`: of a step with a batch,
    weights, gradients and optimizer in float32, as `recipes` train. Activations are what autograd keeps without
    compilation (`counts_memory` says what that holds). Raises UsageError."""
    if (length is not None and length < 1) or batch < 1 or not 0 < seconds <= LONGEST:
        told = f"must be above 0, seconds at most {LONGEST:,}"
        raise UsageError(f"length {length}, batch {batch}, seconds {seconds}: {told}")
    network = model if isinstance(model, nn.Module) else of_config(model)
    parts = towers(network, length, seconds)
    return {
        "batch": batch,
        "parameters": parameters(network),
        "flops": {tower.name: _flops(tower) for tower in parts},
        "cache_bytes": _cache(parts, batch),
        "training_bytes": _training(network, parts, batch),
    }


def of_config(config: Any) -> nn.Module:
    """The model on the meta device. Raises UsageError for what is no model's configuration."""
    for kind, config_type in KINDS.values():
        if type(config) is config_type:
            return build(kind, config)
    raise UsageError(f"{type(config).__name__}: is no configuration of a model")


def parameters(model: nn.Module) -> dict[str, int]:
    """`embedding`: tables of tokens, positions and segments, in each tower; a tied table counts here
    alone, so that `non_embedding` is what scaling laws call N (Kaplan et al. 2020, section 2.1)."""
    tables = []
    for part in model.modules():
        if isinstance(part, TextTransformer):
            tables += [table.weight for table in (part.embed, part.segments) if table is not None]
        if isinstance(part, TextTransformer | ViT | SpeechEncoder) and part.positions is not None:
            tables.append(part.positions)
    total, embedding = (sum(p.numel() for p in some) for some in (model.parameters(), tables))
    return {"total": total, "embedding": embedding, "non_embedding": total - embedding}


def _flops(tower: Tower) -> dict[str, Any]:
    """Of one item; `in_attention`: of these between queries and keys, weights and values."""
    total, between = tower_flops(tower)
    return {
        "unit": tower.unit, "amount": tower.amount, "positions": tower.positions, "forward": total,
        "in_attention": between, f"forward_a_{tower.unit}": round(total / tower.amount),
        f"training_a_{tower.unit}": round(3 * total / tower.amount),
    }  # fmt: skip


def _cache(parts: list[Tower], batch: int) -> dict[str, int] | None:
    """None: the model generates nothing."""
    cached = [tower for tower in parts if tower.cached]
    if not cached:
        return None
    sizes = (("float32", FULL), ("bfloat16", HALF))
    found = {name: sum(cache_bytes(tower, batch, size) for tower in cached) for name, size in sizes}
    return {"tokens": int(cached[-1].amount), **found}


def _training(model: nn.Module, parts: list[Tower], batch: int) -> dict[str, Any]:
    weights = FULL * sum(p.numel() for p in model.parameters())
    gradients = FULL * sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = {name: state_bytes(model, name) for name in ("adamw", "muon")}
    full = sum(activation_bytes(tower, Work(batch, FULL)) for tower in parts)
    half = sum(activation_bytes(tower, Work(batch, HALF)) for tower in parts) + cast_bytes(model)
    fixed = weights + gradients + states["adamw"]
    return {
        "weights": weights, "gradients": gradients, "optimizer": states,
        "activations": {"float32": full, "bfloat16": half},
        "with_adamw": {"float32": fixed + full, "bfloat16": fixed + half},
    }  # fmt: skip
