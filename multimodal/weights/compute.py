"""Number formats for inference: a speech model that computes faster, beside the one it is made of."""

import copy
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.blocked import BlockedAttention
from multimodal.blocks.fused import can_fuse, fuse
from multimodal.blocks.int8 import Int8Linear
from multimodal.blocks.layers import FeedForward
from multimodal.blocks.packed import PackedGelu, PackedLinear, can_pack
from multimodal.blocks.positions import RelativeTerm
from multimodal.errors import UsageError
from multimodal.models.seq2seq import JointConformer, SpeechToText
from multimodal.models.text import TextTransformer
from multimodal.weights.folder import Checkpoint

COMPUTE_TYPES = ("auto", "float32", "bfloat16", "float16", "int8")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# of each model, for each type and device: the tensors it was made of, and what was made
_made: WeakKeyDictionary[nn.Module, dict[tuple[str, torch.device], tuple[Any, nn.Module]]] = WeakKeyDictionary()
_meant: WeakKeyDictionary[nn.Module, tuple[str, torch.device]] = WeakKeyDictionary()  # type and device of those made


def for_inference(checkpoint: Checkpoint, compute_type: str = "auto", device: str | torch.device = "cpu") -> Checkpoint:
    """A speech model on `device` in another number format; the one given stays as it is, and what does not change is
    shared with it. Asked for again it is the same one, unless the weights have changed meanwhile.

    `auto`: on a CPU Whisper's encoder in bfloat16 where the CPU computes in it, and all else in float32; on a GPU a
    Whisper model in float16. `int8` (CPU only): as `auto`, with the decoder's linear maps and its logits in 8-bit
    integers. The encoder takes float32 features; its frames come in the decoder's type, float32 for int8. On a CPU the
    encoder's and a float32 decoder's linear maps hold a second copy of their weights, packed (see `PackedLinear`).

    Raises UsageError for an unknown type, one that the device has not, a model that is none for speech, and one that
    this function made for another type or device."""
    device, model = torch.device(device), checkpoint.model
    _check(checkpoint, compute_type, device)
    if model in _meant:
        if _meant[model][1] == device and compute_type in ("auto", _meant[model][0]):
            return checkpoint
        meant = " on ".join(map(str, _meant[model]))
        raise UsageError(f"compute_type {compute_type!r} on {device}: the model already computes in {meant}")
    kept, state = _made.setdefault(model, {}), _state(model)
    found = kept.get((compute_type, device))
    if found is None or found[0] != state:
        found = kept[compute_type, device] = state, _convert(model, compute_type, device)
        _meant[found[1]] = compute_type, device
    return replace(checkpoint, model=found[1])


def _convert(model: SpeechToText | JointConformer, compute_type: str, device: torch.device) -> nn.Module:
    encoder, decoder = _types(model, compute_type, device)
    made = _in_types(model, encoder, decoder, device)
    if encoder == torch.bfloat16 and device.type == "cpu" and isinstance(made, SpeechToText):
        for block in made.encoder.stack.blocks:
            block.attention.__class__ = BlockedAttention
    if device.type == "cpu" and encoder != torch.float16 and can_pack():
        _pack_encoder(made.encoder)
    if compute_type == "int8":
        _replace_linears(made.decoder, Int8Linear)
    elif device.type == "cpu" and decoder == torch.float32 and can_pack():
        _replace_linears(made.decoder, PackedLinear)
    return made.eval()


def _pack_encoder(encoder: nn.Module) -> None:
    for module in list(encoder.modules()):
        if isinstance(module, FeedForward) and module.gate is None and module.activation is F.gelu:
            module.up, module.activation = PackedGelu(module.up.weight, module.up.bias), nn.Identity()
        for name, child in module.named_children():
            if type(child) is nn.Linear and not isinstance(module, RelativeTerm):  # which asks for its map's type
                setattr(module, name, PackedLinear(child.weight, child.bias))


def fast_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16 (AVX-512 BF16, AMX, Arm's BF16); elsewhere it is slower than float32."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _check(checkpoint: Checkpoint, compute_type: str, device: torch.device) -> None:
    if compute_type not in COMPUTE_TYPES:
        raise UsageError(f"compute_type {compute_type!r}: unknown (known: {', '.join(COMPUTE_TYPES)})")
    if compute_type == "int8" and device.type != "cpu":
        raise UsageError(f"compute_type 'int8': is for a CPU, not for device {device}; float16 is fast there")
    if compute_type == "float16" and device.type == "cpu":
        raise UsageError("compute_type 'float16': is for a GPU, not for device cpu; use auto, bfloat16 or int8")
    if not isinstance(checkpoint.model, SpeechToText | JointConformer):
        raise UsageError(f"model {checkpoint.source}: is a {checkpoint.kind}, a compute_type needs a speech model")


def _types(model: nn.Module, compute_type: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Of the encoder, and of all else."""
    if compute_type in _DTYPES:
        return (_DTYPES[compute_type],) * 2
    if not isinstance(model, SpeechToText):
        return torch.float32, torch.float32
    if device.type == "cuda":
        return torch.float16, torch.float16
    # the decoder's small products are slower in bfloat16
    return torch.bfloat16 if device.type == "cpu" and fast_bfloat16() else torch.float32, torch.float32


def _in_types(model: nn.Module, encoder: torch.dtype, decoder: torch.dtype, device: torch.device) -> nn.Module:
    """A copy with the encoder's tensors in one type and all else in another; what fits already is shared."""
    inside = {id(tensor) for tensor in [*model.encoder.parameters(), *model.encoder.buffers()]}
    tensors = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        dtype = encoder if id(tensor) in inside else decoder
        made = tensor.to(device, dtype if tensor.is_floating_point() else None)
        if made is not tensor and isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made.detach(), requires_grad=False)
        tensors[id(tensor)] = made
    copied = copy.deepcopy(model, tensors)  # takes for each tensor what the table has for it
    if encoder != torch.float32:
        copied.encoder.register_forward_pre_hook(lambda _, inputs: _cast(inputs, encoder))
        copied.encoder.register_forward_hook(lambda _, inputs, output: _cast(output, decoder))
    return copied


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of floats, or those of a tuple, in this type."""
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _replace_linears(decoder: TextTransformer | None, kind: type[nn.Module]) -> None:
    """Puts this `kind` in the place of the decoder's linear maps, those of query, key and value as one; logits through
    the embedding get one of their own."""
    if decoder is None:
        return
    for block in decoder.stack.blocks:
        if can_fuse(block):
            fuse(block)
    for module in list(decoder.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, kind(child.weight, child.bias))
    if decoder.head is None:
        decoder.head = kind(decoder.embed.weight)


def _state(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """What changes when a weight does. Tensors made in inference mode count no changes."""
    tensors = [*model.parameters(), *model.buffers()]
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
