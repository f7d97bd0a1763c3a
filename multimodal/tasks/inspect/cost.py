"""Cost of a model: parameters, operations, the cache of keys and values, and the memory of training.

Operations and activations are counted while the model runs on fake tensors, which have shapes and no data, as on a CPU:
products of matrices and convolutions by `torch.utils.flop_counter`, and what autograd saves for the backward pass
without compilation. Attention counts all queries and keys: a causal mask or a window saves nothing. A GPU's kernels
keep about as much (its RMSNorm one state less)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from multimodal.blocks.experts import even_routing
from multimodal.errors import UsageError
from multimodal.models.conformer import ConformerEncoder
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViT
from multimodal.models.whisper import WhisperEncoder
from multimodal.tasks.inspect.cost_parts import Part, Sizes, parts
from multimodal.tasks.inspect.options import CostOptions
from multimodal.tasks.inspect.scaling import compute_budget
from multimodal.weights.folder import KINDS, build

FULL, HALF = 4, 2  # bytes
FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BETWEEN = (torch.ops.aten.bmm, FUSED)  # products of queries with keys, and of weights with values


def counts(
    model: nn.Module | Any, length: int | None = None, batch: int = CostOptions.batch.default,
    seconds: float = CostOptions.seconds.default, training_tokens: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Costs of a model, or of a configuration, whose weights are never made.

    `length`, `batch`, `seconds`, `training_tokens`: see `CostOptions`; an image has the size of the configuration.
    `flops`: of the forward pass of one item, for each part of the model; training takes three times as many.
    `cache_bytes`: of a batch. `training_bytes`: of a step with a batch, with weights, gradients and optimizer in
    float32. `compute`: of training a language model (`compute_budget`). Raises UsageError."""
    network = model if isinstance(model, nn.Module) else of_config(model)
    CostOptions(length=length, batch=batch, seconds=seconds, training_tokens=training_tokens)  # checks them
    language = isinstance(network, EncoderDecoder | TextTransformer) and _predicts(network)
    if training_tokens is not None and not language:
        raise UsageError("needs a model that predicts tokens of text", argument="training_tokens")
    sizes = Sizes(batch, length, seconds)
    (found, full), (_, half) = (_measured(network, sizes, kind) for kind in ("float32", "bfloat16"))
    return {
        "batch": batch,
        "parameters": parameters(network),
        "flops": {part.name: _flops(part, batch) for part in found},
        "cache_bytes": _cache_bytes(found, batch),
        "training_bytes": _training(network, {"float32": full, "bfloat16": half}),
        **({"compute": compute_budget(parameters(network)["total"], training_tokens)} if language else {}),
    }


def _predicts(network: EncoderDecoder | TextTransformer) -> bool:
    return isinstance(network, EncoderDecoder) or network.config.tied is not None


def of_config(config: Any) -> nn.Module:
    """The model on the meta device. Raises UsageError for a value that is not a model's configuration."""
    for kind, config_type in KINDS.values():
        if type(config) is config_type:
            return build(kind, config)
    raise UsageError(f"expected a model's configuration, got {type(config).__name__}")


def parameters(model: nn.Module) -> dict[str, int]:
    """`embedding`: tables of tokens, positions and segments, in each tower; a tied table counts here
    alone, so that `non_embedding` is what scaling laws call N (Kaplan et al. 2020, section 2.1)."""
    tables = []
    for part in model.modules():
        if isinstance(part, TextTransformer):
            tables += [table.weight for table in (part.embed, part.segments) if table is not None]
        if isinstance(part, TextTransformer | ViT | WhisperEncoder) and part.positions is not None:
            tables.append(part.positions)
    total, embedding = (sum(p.numel() for p in some) for some in (model.parameters(), tables))
    return {"total": total, "embedding": embedding, "non_embedding": total - embedding}


@contextmanager
def _fake_copy(network: nn.Module) -> Iterator[nn.Module]:
    """A model of the same configuration in training mode, whose tensors have shapes and no data."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    copy, mode = of_config(_one_group(network.config)).train(), FakeTensorMode()
    for module in copy.modules():
        if isinstance(module, ConformerEncoder):  # or a random draw, which fake tensors lack, would choose chunks
            module.config = replace(module.config, dynamic=False)
        for name, tensor in module._parameters.items():
            if tensor is not None:
                fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
                module._parameters[name] = nn.Parameter(fake, tensor.requires_grad)
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = FakeTensor(mode, tensor, torch.device("cpu"))
    with mode:
        yield copy


def _one_group(config: Any) -> Any:
    """A configuration without groups of languages: a row uses one of them, which its ids choose."""
    if isinstance(config, EncoderDecoderConfig):
        return replace(config, encoder=_one_group(config.encoder), decoder=_one_group(config.decoder))
    if isinstance(config, TextConfig) and config.languages:
        return replace(config, languages=(), stack=replace(config.stack, groups=0, grouped=0))
    return config


def _measured(network: nn.Module, sizes: Sizes, kind: str) -> tuple[list[Part], int]:
    """The parts with their operations (in float32), and the bytes that autograd saves beside the weights, each storage
    once; bfloat16 by autocast, with its copies of the weights. Recomputed blocks keep their inputs and all of the
    largest."""
    saved: dict[int, torch.UntypedStorage] = {}

    def size() -> int:
        return sum(storage.nbytes() for storage in saved.values())

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return x

    found, total, between = [], 0, 0
    with (
        _fake_copy(network) as model,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=kind == "bfloat16"),
        even_routing(),
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
    ):
        own = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers()]}
        blocks = _watch_recomputed(model, size)
        counter = FlopCounterMode(display=False, custom_mapping={FUSED: _fused_flops})
        with counter if kind == "float32" else nullcontext():
            for part in parts(model, sizes):
                now = counter.get_flop_counts().get("Global", {})
                flops, in_attention = sum(now.values()), sum(now.get(op, 0) for op in BETWEEN)
                found.append(part._replace(flops=flops - total, in_attention=in_attention - between))
                total, between = flops, in_attention
        losses = [output.float().log_softmax(-1).sum() for part in found for output in part.outputs]
    recomputed = [kept for kept, _ in blocks]
    kept = size() - sum(recomputed) + max(recomputed, default=0) + sum(given for _, given in blocks)
    del losses
    return found, kept


def _watch_recomputed(model: nn.Module, size: Callable[[], int]) -> list[tuple[int, int]]:
    """Turn checkpointing off. A run appends for each block of it the bytes that it saved, and those of its input."""
    blocks: list[tuple[int, int]] = []
    for stack in model.modules():
        if getattr(stack, "checkpointing", False):
            stack.checkpointing = False
            for block in set(stack.blocks):
                block.register_forward_pre_hook(lambda _, inputs: blocks.append((size(), inputs[0].nbytes)))
                block.register_forward_hook(lambda *_: blocks.append((size() - blocks[-1][0], blocks.pop()[1])))
    return blocks


def _fused_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """FLOPs of the CPU's fused attention, which `torch.utils.flop_counter` does not count."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


def _flops(part: Part, batch: int) -> dict[str, Any]:
    """FLOPs of one item; `in_attention`: the part between queries and keys, weights and values."""
    forward = part.flops // batch
    return {
        "unit": part.unit, "amount": part.amount, "positions": part.positions, "forward": forward,
        "in_attention": part.in_attention // batch, f"forward_a_{part.unit}": round(forward / part.amount),
        f"training_a_{part.unit}": round(3 * forward / part.amount),
    }  # fmt: skip


def _cache_bytes(found: list[Part], batch: int) -> dict[str, int] | None:
    """None: the model generates nothing."""
    cached = [part for part in found if part.cached]
    if not cached:
        return None
    numbers = batch * sum(part.cached for part in cached)
    return {"tokens": int(cached[-1].amount), "float32": FULL * numbers, "bfloat16": HALF * numbers}


def _training(model: nn.Module, activations: dict[str, int]) -> dict[str, Any]:
    weights = FULL * sum(p.numel() for p in model.parameters())
    gradients = FULL * sum(p.numel() for p in model.parameters() if p.requires_grad)
    states = {name: _state_bytes(model, name) for name in ("adamw", "muon")}
    fixed = weights + gradients + states["adamw"]
    return {
        "weights": weights, "gradients": gradients, "optimizer": states, "activations": activations,
        "with_adamw": {name: fixed + kept for name, kept in activations.items()},
    }  # fmt: skip


def _state_bytes(model: nn.Module, optimizer: str) -> int:
    """State of `train.optim.optimizers` after a step: two moments of each number and a step count of each tensor
    (AdamW), or one moment of the matrices in blocks (Muon)."""
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            muon = optimizer == "muon" and parameter.ndim == 2 and ".blocks." in f".{name}"
            total += FULL * (parameter.numel() if muon else 2 * parameter.numel() + 1)
    return total
