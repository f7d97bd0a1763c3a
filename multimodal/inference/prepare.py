"""Models prepared for inference: faster copies, in other number formats, which belong to the caller."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.blocks.stack import Stack
from multimodal.errors import UsageError
from multimodal.inference.bf16_attention import BlockedAttention
from multimodal.inference.frozen import Frozen
from multimodal.inference.fused_decoder import can_fuse, fuse
from multimodal.inference.int8 import Int8Linear
from multimodal.inference.one_query import OneQuery, has_one_query
from multimodal.inference.packed import PackedLinear, PackedPatches, can_pack, pack
from multimodal.models.encoder_decoder import TextToText
from multimodal.models.text import TextTransformer
from multimodal.models.vit import MapPool, ViT
from multimodal.models.whisper import JointConformer, SpeechToText
from multimodal.weights.folder import Checkpoint

COMPUTE_TYPES = ("auto", "float32", "bfloat16", "float16", "int8")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def prepare_for_inference(
    checkpoint: Checkpoint, compute_type: str = "auto", device: str | torch.device | None = None
) -> Checkpoint:
    """Convert a model of speech, images or text for fast inference on `device` (None: where it is).

    The result shares no memory with the checkpoint given, which stays as it is: later changes of either leave the
    other alone. Nothing is cached, so each call converts again; whoever calls `classify`, `transcribe` and the like
    more than once passes them the result. A checkpoint that is `prepared` in this way already comes back itself.

    A prepared model is frozen. Its weights have no gradient, and on a CPU most of them lie packed (`PackedLinear`),
    where PyTorch can neither move, cast, save nor copy them: what tries raises UsageError. Do not edit the rest in
    place; change the original and prepare that.

    `auto`: on a CPU Whisper's encoder in bfloat16 where the CPU computes in it, and all else in float32; on a GPU a
    Whisper model in float16, a Conformer's encoder and a model of images or text in bfloat16. `int8` (CPU only, for
    models that write text): as `auto`, with the decoder's linear maps and its logits in 8-bit integers. The inputs are
    float32. The frames of speech come in the decoder's type, float32 for int8. Of a model of images the blocks
    compute in the type, those of a decoder on a CPU in float32, and their outputs are float32; so of a model of
    text on a CPU, where a decoder without a source has the type too. On a GPU all of a model of text is in the type.

    Raises UsageError for an unknown type, one that the device or the model has not, a model that is for neither, and
    one prepared for another type or device."""
    model = checkpoint.model
    device = usable_device(next(model.parameters()).device if device is None else device)
    _check(checkpoint, compute_type, device)
    if checkpoint.prepared is not None:
        if checkpoint.prepared[1] == device and compute_type in ("auto", checkpoint.prepared[0]):
            return checkpoint
        known = " on ".join(map(str, checkpoint.prepared))
        raise UsageError(f"compute_type {compute_type!r} on {device}: the model already computes in {known}")
    return replace(checkpoint, model=_convert(model, compute_type, device), prepared=(compute_type, device))


def usable_device(name: str | torch.device) -> torch.device:
    """With its number: `cuda` is `cuda:0`. Raises UsageError where torch has no such device here."""
    try:
        found = torch.zeros(1, device=name)
        found.sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device {str(name)!r}: cannot be used ({str(error).splitlines()[0]:.100})") from None
    return found.device


def _convert(model: nn.Module, compute_type: str, device: torch.device) -> nn.Module:
    dtype, rest = _types(model, compute_type, device)
    towers = _towers(model, device)
    made = _in_types(model, towers, dtype, rest, device)
    if device.type == "cpu":
        _for_cpu(made, model, towers, rest, compute_type)
    for tower in map(made.get_submodule, towers):
        _computes_in(tower, dtype, rest)
        if dtype == torch.bfloat16 and device.type == "cpu":
            for part in tower.modules():
                if type(part) is Attention and part.heads == part.kv_heads and part.relative is None:
                    part.__class__ = BlockedAttention
    for part in made.modules():
        if isinstance(part, ViT):
            part.resampled = {}  # its positions change no more
    _own(made, model)
    return made.eval().requires_grad_(False)


def _for_cpu(made: nn.Module, model: nn.Module, towers: list[str], rest: torch.dtype, compute_type: str) -> None:
    for decoder in _decoders(made):
        if compute_type == "int8" or (rest == torch.float32 and can_pack(rest)):
            _replace_linears(decoder, Int8Linear if compute_type == "int8" else PackedLinear)
    speech = isinstance(model, SpeechToText | JointConformer)
    in_float32 = ["decoder"] if rest == torch.float32 and getattr(model, "decoder", None) is not None else []
    for name in towers + in_float32 if speech else [""]:
        pack(made.get_submodule(name), model.get_submodule(name))
    for name, part in list(made.named_modules()):
        tied = isinstance(part, TextTransformer) and part.config.tied and part.head is None
        if tied and rest == torch.float32 and can_pack(rest):
            part.head = _tied(part, PackedLinear)
        if isinstance(part, ViT):
            if can_pack(part.embed.weight.dtype):
                part.embed = PackedPatches(part.embed)
            _pack_last(part, model.get_submodule(name))


def _pack_last(made: ViT, model: ViT) -> None:
    """Of its last block a tower pooled by its class token wants that one alone."""
    if made.config.pool == "token" and len(made.stack.blocks):
        last, like = made.stack.last, model.stack.last
        if has_one_query(last.attention):
            last.one_query = OneQuery(last.attention, like.attention, next(last.parameters()).dtype)


def _towers(model: nn.Module, device: torch.device) -> list[str]:
    """Names of the modules that compute in the type asked for: an encoder of speech; of other models all blocks, but
    on a CPU not those of a decoder beside an encoder, whose small products are slower in bfloat16."""
    if isinstance(model, SpeechToText | JointConformer):
        return ["encoder"]
    apart = device.type == "cpu" and not isinstance(model, TextTransformer)
    writing = {part for one in _decoders(model) for part in one.modules()} if apart else set()
    parts = {name: part for name, part in model.named_modules() if part not in writing}
    return [
        *(name for name, part in parts.items() if isinstance(part, Stack | MapPool)),
        *(f"{name}.embed".lstrip(".") for name, part in parts.items() if isinstance(part, ViT)),
    ]


def _decoders(model: nn.Module) -> list[TextTransformer | Stack]:
    """What writes text: causal towers with logits, and stacks that attend to a source."""
    towers = [part for part in model.modules() if isinstance(part, TextTransformer)]
    found = [tower for tower in towers if tower.config.causal and tower.config.tied is not None]
    inside = {part for one in found for part in one.modules()}
    stacks = [part for part in model.modules() if isinstance(part, Stack) and part not in inside]
    return found + [stack for stack in stacks if stack.config.block.cross is not None]


def _computes_in(tower: nn.Module, dtype: torch.dtype, rest: torch.dtype) -> None:
    """Takes its inputs in one type, and gives its outputs in another. A stack's last norm is one of the rest."""
    if dtype == torch.float32:
        return

    def cast(_: nn.Module, inputs: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return _cast(inputs, dtype), {name: _cast(value, dtype) for name, value in named.items()}

    tower.register_forward_pre_hook(cast, with_kwargs=True)
    tower.register_forward_hook(lambda _, inputs, output: _cast(output, rest))
    if isinstance(tower, Stack) and tower.norm is not None:
        tower.norm.register_forward_pre_hook(lambda _, inputs: _cast(inputs, rest))


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16 (AVX-512 BF16, AMX, Arm's BF16); elsewhere it is slower than float32."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _check(checkpoint: Checkpoint, compute_type: str, device: torch.device) -> None:
    model = checkpoint.model
    if checkpoint.prepared is None and any(isinstance(part, Frozen) for part in model.modules()):
        raise UsageError(f"model {checkpoint.source}: is prepared for inference; pass the Checkpoint that came with it")
    if compute_type not in COMPUTE_TYPES:
        raise UsageError(f"compute_type {compute_type!r}: unknown (known: {', '.join(COMPUTE_TYPES)})")
    if compute_type == "int8" and device.type != "cpu":
        raise UsageError(f"compute_type 'int8': is for a CPU, not for device {device}; float16 is fast there")
    if compute_type == "float16" and device.type == "cpu":
        raise UsageError("compute_type 'float16': is for a GPU, not for device cpu; use auto or bfloat16")
    speech = isinstance(model, SpeechToText | JointConformer)
    if not speech and not any(isinstance(part, ViT | TextTransformer) for part in model.modules()):
        raise UsageError(
            f"model {checkpoint.source}: is a {checkpoint.kind}, a compute_type needs one of pictures or text, or one "
            "that writes what is said"
        )
    if compute_type == "int8" and not speech and not _decoders(model):
        raise UsageError(
            f"model {checkpoint.source}: is a {checkpoint.kind}, compute_type 'int8' is for those that write text; "
            "bfloat16 is fast here"
        )


def _types(model: nn.Module, compute_type: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Of the towers, and of all else."""
    speech, text = isinstance(model, SpeechToText | JointConformer), isinstance(model, TextTransformer | TextToText)
    whole = speech or (text and device.type == "cuda")
    if compute_type in _DTYPES:
        return _DTYPES[compute_type], _DTYPES[compute_type] if whole else torch.float32
    if not speech:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return dtype, dtype if whole else torch.float32
    if not isinstance(model, SpeechToText):
        return torch.bfloat16 if device.type == "cuda" else torch.float32, torch.float32
    if device.type == "cuda":
        return torch.float16, torch.float16
    # the decoder's small products are slower in bfloat16
    return torch.bfloat16 if device.type == "cpu" and fast_bfloat16() else torch.float32, torch.float32


def _in_types(
    model: nn.Module, towers: list[str], dtype: torch.dtype, rest: torch.dtype, device: torch.device
) -> nn.Module:
    """A copy with the towers' tensors in one type and all else in another. What fits already is shared, until `_own`:
    most of it is only packed from, and copies would take memory."""
    inside: set[int] = set()
    for tower in map(model.get_submodule, towers):
        parts = tower.blocks if isinstance(tower, Stack) else tower
        inside |= {id(tensor) for tensor in [*parts.parameters(), *parts.buffers()]}
    tensors = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        to = dtype if id(tensor) in inside else rest
        made = tensor.to(device, to if tensor.is_floating_point() else None)
        if made is not tensor and isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made.detach(), requires_grad=False)
        tensors[id(tensor)] = made
    return copy.deepcopy(model, tensors)  # takes for each tensor what the table has for it


def _own(made: nn.Module, model: nn.Module) -> None:
    """Puts copies in the place of the tensors that `made` still shares with `model`."""
    shared = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    copies: dict[int, Tensor] = {}  # a tensor may be in two places
    for part in made.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if id(tensor) in shared and id(tensor) not in copies:
                    own = tensor.detach().clone()
                    copies[id(tensor)] = nn.Parameter(own, False) if isinstance(tensor, nn.Parameter) else own
                table[name] = copies.get(id(tensor), tensor)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of floats, or those of a tuple, in this type."""
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _replace_linears(decoder: TextTransformer | Stack, kind: type[nn.Module]) -> None:
    """Puts this `kind` in the place of the decoder's linear maps, those of query, key and value as one; logits through
    the embedding get one of their own."""
    whole = isinstance(decoder, TextTransformer)
    for block in decoder.stack.blocks if whole else []:
        if can_fuse(block):
            fuse(block)
    for module in list(decoder.modules()) if kind is Int8Linear else []:  # `pack` has the others
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, kind(child.weight, child.bias))
    if whole and decoder.head is None:
        decoder.head = _tied(decoder, kind)


def _tied(tower: TextTransformer, kind: type[nn.Module]) -> nn.Module:
    """Logits through the embedding."""
    weight, scale = tower.embed.weight.detach(), tower.config.logit_scale
    return kind(weight if scale == 1 else weight * scale, tower.tied_bias)
