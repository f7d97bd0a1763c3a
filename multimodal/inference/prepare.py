"""Models prepared for inference: faster copies, in other number formats, owned by the caller."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.blocks.attention import Attention
from multimodal.blocks.layers import is_customized
from multimodal.blocks.stack import Block, Stack
from multimodal.errors import UsageError
from multimodal.inference import cuda_graphs
from multimodal.inference.bf16_attention import BlockedAttention
from multimodal.inference.encoders import PreparedViT, fold_norms, prepare_speech
from multimodal.inference.fused_decoder import FusedAttention, FusedBlock, can_fuse, can_join, plain_norm
from multimodal.inference.int8 import Int8Linear
from multimodal.inference.modules import Frozen, copy_module, replace_modules
from multimodal.inference.native.attention import attend_natively, prefers_native_attention
from multimodal.inference.native.decoder import NativeDecoder, has_native_step
from multimodal.inference.native.encoder import in_native, many_rows, prefers_int8, prefers_native
from multimodal.inference.native.library import library
from multimodal.inference.native.linear import NativeLinear
from multimodal.inference.one_query import OneQueryBlock, has_one_query
from multimodal.inference.options import COMPUTE_TYPES
from multimodal.inference.packed import PackedLinear, PackedPatches, can_pack, pack, row_linear
from multimodal.inference.tune import is_intel, quickest
from multimodal.models.any_to_text import AnyToText
from multimodal.models.conformer import ConformerCTC
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.speech.transducer import Transducer
from multimodal.models.text import TextTransformer
from multimodal.models.vision.tower import ConvTower
from multimodal.models.vit import MapPool, ViT
from multimodal.models.whisper import Whisper
from multimodal.system.memory import keep_freed_memory
from multimodal.weights.folder import Checkpoint

SPEECH = Whisper | ConformerCTC | Transducer | SpeechSeq2Seq
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def prepare_for_inference(
    checkpoint: Checkpoint, compute_type: str = "auto", device: str | torch.device | None = None
) -> Checkpoint:
    """Convert a speech, image or text model for fast inference on `device` (None: where it is).

    The result shares no memory with the given checkpoint, which stays as it is. Nothing is cached, so each call
    converts again: pass the result to `classify`, `transcribe` and the like to convert once. A checkpoint that is
    already `prepared` in this way is returned as it is.

    A prepared model is frozen: its weights have no gradient, and on a CPU most of them are packed (`PackedLinear`), so
    PyTorch can neither move, cast, save nor copy them; those calls raise UsageError. Do not edit the rest in place;
    change the original and prepare that.

    A model with forward hooks, adapters of peft or other modules that are not ours keeps its modules and hooks, and so
    is slower.

    `auto`: on a CPU Whisper's encoder in bfloat16 where that is the quicker type, and all else in float32; on a GPU
    Whisper in float16, a Conformer's encoder and image or text models in bfloat16. `int8` (CPU only): as `auto`, with
    the linear maps of decoders and their logits in 8-bit integers; with a C++ compiler (`native.library`) the keys and
    values of a source in bfloat16, and where that is quicker (AVX2, VNNI) the linear maps of all blocks in 8-bit
    integers, without which a model must write text. Inputs are float32, but speech frames have the decoder's type
    (float32 for int8). An image model's blocks compute in the type, those of its decoder on a CPU in float32, and its
    outputs are float32; likewise a text or any-to-text model's on a CPU, where a decoder without a source has the type
    too. On a GPU the whole text model has the type.

    Raises UsageError for an unknown type, a type that the device or the model does not support (int8: one with hooks or
    adapters), a model of another kind, and a model prepared for another type or device."""
    model = checkpoint.model
    device = usable_device(next(model.parameters()).device if device is None else device)
    _check(checkpoint, compute_type, device)
    if checkpoint.prepared is not None:
        if checkpoint.prepared[1] == device and compute_type in ("auto", checkpoint.prepared[0]):
            return checkpoint
        known = " on ".join(map(str, checkpoint.prepared))
        raise UsageError(f"compute_type {compute_type!r} on {device}: the model already computes in {known}")
    return replace(checkpoint, model=_convert(model, compute_type, device), prepared=(compute_type, device))


def automatic_device() -> torch.device:
    """A GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usable_device(name: str | torch.device) -> torch.device:
    """The device with its number: `cuda` is `cuda:0`. Raises UsageError where torch has no such device here."""
    try:
        probe = torch.zeros(1, device=name)
        probe.sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).splitlines()[0].partition(". ")[0]  # then comes advice on drivers
        if cause.startswith("Expected one of"):
            cause = "torch has no such device type; usual ones are cpu, cuda, cuda:1"
        raise UsageError(f"{str(name)!r}: cannot be used ({cause})", argument="device") from None
    return probe.device


def _convert(model: nn.Module, compute_type: str, device: torch.device) -> nn.Module:
    dtype, rest = _types(model, compute_type, device)
    towers, fast = _towers(model, device), not is_customized(model)
    made = _in_types(model, towers, dtype, rest, device)
    if device.type == "cpu":
        keep_freed_memory()
        if fast:
            _for_cpu(made, model, towers, dtype, rest, compute_type)
    for tower in map(made.get_submodule, towers):
        _computes_in(tower, dtype, rest)
        if fast and dtype == torch.bfloat16 and device.type == "cpu":
            replace_modules(tower, lambda part: BlockedAttention(part) if _has_blocks(part) else part)
    made = _replaced(made, model, device) if fast else _in_their_types(made.eval())
    _own(made, model)
    return made.requires_grad_(False)


def _in_their_types(made: nn.Module) -> nn.Module:
    """Move weights that hooks compute, such as those of pruning, to the place and type of what they are made of."""
    for part in made.modules():
        source = next(part.parameters(recurse=False), None)
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and source is not None:
                vars(part)[name] = value.to(source.device, source.dtype)
    return made


def _replaced(made: nn.Module, model: nn.Module, device: torch.device) -> nn.Module:
    """Replace modules of `made`, a copy of `model` in any types, by faster ones."""
    decoders = _decoders(made) if device.type in cuda_graphs.REPLAYING else []
    for decoder in decoders:
        _join_projections(decoder)

    def choose(part: nn.Module) -> nn.Module:
        if isinstance(part, ViT):
            return PreparedViT(part)
        if not isinstance(part, TextTransformer):
            return part
        if part in decoders and cuda_graphs.has_static_step(part):
            return cuda_graphs.GraphDecoder(part)
        return NativeDecoder(part) if has_native_step(part) else part

    fold_norms(made, model)
    return replace_modules(made.eval(), choose)


def _join_projections(decoder: nn.Module) -> None:
    """One product for query, key and value: at a token each, launches are most of the time on a GPU."""
    for block in [part for part in decoder.modules() if isinstance(part, Block)]:
        if can_join(block.attention):
            block.attention = FusedAttention(block.attention)


def _has_blocks(part: nn.Module) -> bool:
    if type(part) is not Attention or part.heads != part.kv_heads:
        return False
    others = (part.relative, part.gate, part.config.softcap, part.query_norm, part.inner_norm)
    return all(other is None for other in others)


def _for_cpu(
    made: nn.Module, model: nn.Module, towers: list[str], dtype: torch.dtype, rest: torch.dtype, compute_type: str
) -> None:  # fmt: skip
    decoders, packs = _decoders(made), rest == torch.float32 and can_pack(rest)
    int8 = compute_type == "int8"
    compiled = bool(decoders) and rest == torch.float32 and library() is not None
    kind = partial(NativeLinear, int8=int8) if compiled else Int8Linear if int8 else row_linear
    if compiled or int8 or packs:
        for decoder in decoders:
            _fuse(decoder, kind, compiled or int8)
    quick = _encodes_in_int8(model, compute_type)
    native = dtype == rest == torch.float32 and prefers_native()
    if quick or native:
        for name in towers:
            owner = made.get_submodule(name.rpartition(".")[0])
            # disentangled attention maps its table of positions to queries and keys alone
            apart = isinstance(owner, TextTransformer) and owner.relative is not None
            in_native(made.get_submodule(name), quick, join=not apart)
    prepare_speech(made, native)
    if (dtype == torch.float32 or compiled) and prefers_native_attention():
        attend_natively(made)
    single_rows = {part for decoder in decoders for part in decoder.modules()}
    packed = [""]  # the whole model
    if isinstance(model, SPEECH):
        decodes = rest == torch.float32 and getattr(model, "decoder", None) is not None
        packed = [*towers, "decoder"] if decodes else towers
    for name in packed:
        pack(made.get_submodule(name), model.get_submodule(name), single_rows)
    for name, part in list(made.named_modules()):
        if isinstance(part, TextTransformer) and part.config.tied and part.head is None and packs:
            part.head = _tied_head(part, PackedLinear)
        if isinstance(part, ViT):
            if can_pack(part.embed.weight.dtype):
                part.embed = PackedPatches(part.embed)
            _replace_last_block(part.stack, model.get_submodule(name).stack, part.config.pool)


def _replace_last_block(stack: Stack, original: Stack, pool: str) -> None:
    """A tower pooled by its class token needs only that one from its last block."""
    if pool == "token" and len(stack.blocks):
        last = (stack.config.layers - 1) % len(stack.blocks)
        if has_one_query(stack.blocks[last]):
            stack.blocks[last] = OneQueryBlock(stack.blocks[last], original.blocks[last])


def _towers(model: nn.Module, device: torch.device) -> list[str]:
    """Names of the modules that compute in the requested type: a speech model's encoder; all blocks of other models,
    but on a CPU not those of a decoder with a source, whose small products are slower in bfloat16."""
    if isinstance(model, SPEECH):
        return ["encoder"]
    whole = isinstance(model, TextTransformer) or (isinstance(model, AnyToText) and not model.config.crosses)
    apart = device.type == "cpu" and not whole
    writing = {part for one in _decoders(model) for part in one.modules()} if apart else set()
    parts = {name: part for name, part in model.named_modules() if part not in writing}
    return [
        *(name for name, part in parts.items() if isinstance(part, Stack | MapPool | ConvTower)),
        *(f"{name}.embed".lstrip(".") for name, part in parts.items() if isinstance(part, ViT)),
    ]


def _decoders(model: nn.Module) -> list[TextTransformer | Stack]:
    """The parts that write text: causal towers with logits, and stacks with cross-attention."""
    towers = [part for part in model.modules() if isinstance(part, TextTransformer)]
    writers = [tower for tower in towers if tower.config.causal and tower.config.tied is not None]
    inside = {part for one in writers for part in one.modules()}
    stacks = [part for part in model.modules() if isinstance(part, Stack) and part not in inside]
    return writers + [stack for stack in stacks if stack.config.block.cross is not None]


def _computes_in(tower: nn.Module, dtype: torch.dtype, rest: torch.dtype) -> None:
    """Cast the tower's inputs to `dtype` and its outputs to `rest`, in which a stack's last norm computes."""
    if dtype == torch.float32:
        return
    # no local functions, which pickle refuses before the model itself can
    tower.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
    tower.register_forward_hook(partial(_cast_last, rest))
    if isinstance(tower, Stack) and tower.norm is not None:
        tower.norm.register_forward_pre_hook(partial(_cast_last, rest))


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, inputs: tuple, named: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:  # fmt: skip
    return _cast(inputs, dtype), {name: _cast(value, dtype) for name, value in named.items()}


def _cast_last(dtype: torch.dtype, _: nn.Module, *values: Any) -> Any:
    """Inputs before a call, the output after it."""
    return _cast(values[-1], dtype)


def fast_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 (AVX-512 BF16, AMX, Arm's BF16); others are slower than float32."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def prefers_bfloat16() -> bool:
    """Return True if this CPU multiplies bfloat16 quicker than float32, by its kind: Intel's processors need AMX."""
    return fast_bfloat16() and not (is_intel() and not torch.cpu.get_capabilities().get("amx_bf16", False))


def quicker_type() -> torch.dtype:
    """bfloat16 or float32, in which an encoder's products are quicker here; measured once."""
    if not fast_bfloat16():
        return torch.float32
    types = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    works = {name: many_rows(PackedLinear, dtype) for name, dtype in types.items()}
    return types[quickest("encoder's type", works, "bfloat16" if prefers_bfloat16() else "float32")]


def _encodes_in_int8(model: nn.Module, compute_type: str) -> bool:
    if compute_type != "int8":
        return False
    return prefers_int8(quicker_type() if isinstance(model, Whisper) else torch.float32)


def _check(checkpoint: Checkpoint, compute_type: str, device: torch.device) -> None:
    model = checkpoint.model
    if checkpoint.prepared is None and any(isinstance(part, Frozen) for part in model.modules()):
        raise UsageError(f"model {checkpoint.source}: is prepared for inference; pass the Checkpoint that came with it")
    if compute_type not in COMPUTE_TYPES:
        raise UsageError(f"must be one of {', '.join(COMPUTE_TYPES)} (got {compute_type!r})", argument="compute_type")
    if compute_type == "int8" and device.type != "cpu":
        raise UsageError(f"compute_type='int8' needs a CPU (got device {device}); float16 is fast there")
    if compute_type == "float16" and device.type == "cpu":
        raise UsageError("compute_type='float16' needs a GPU (got device cpu); use auto or bfloat16")
    speech = isinstance(model, SPEECH)
    if not speech and not any(isinstance(part, ViT | TextTransformer) for part in model.modules()):
        raise UsageError(
            f"model {checkpoint.source}: compute_type needs a model for images, text or transcription, "
            f"got {checkpoint.kind}"
        )
    if compute_type == "int8" and is_customized(model):
        raise UsageError(
            f"model {checkpoint.source}: compute_type='int8' replaces modules, which have forward hooks or adapters"
        )
    if compute_type == "int8" and not speech and not _decoders(model) and not _encodes_in_int8(model, compute_type):
        raise UsageError(
            f"model {checkpoint.source}: compute_type='int8' of a {checkpoint.kind} model needs a C++ compiler and a "
            "processor that is quicker in it (AVX2, VNNI); expected float32 or bfloat16"
        )


def _types(model: nn.Module, compute_type: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Types of the towers and of the rest."""
    speech, text = isinstance(model, SPEECH), isinstance(model, TextTransformer | EncoderDecoder)
    whole = speech or (text and device.type == "cuda")
    if compute_type in _DTYPES:
        return _DTYPES[compute_type], _DTYPES[compute_type] if whole else torch.float32
    if not speech:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return dtype, dtype if whole else torch.float32
    if not isinstance(model, Whisper):
        return torch.bfloat16 if device.type == "cuda" else torch.float32, torch.float32
    if device.type == "cuda":
        return torch.float16, torch.float16
    # the decoder's small products are slower in bfloat16
    plain = device.type != "cpu" or _encodes_in_int8(model, compute_type)
    return torch.float32 if plain else quicker_type(), torch.float32


def _in_types(
    model: nn.Module, towers: list[str], dtype: torch.dtype, rest: torch.dtype, device: torch.device
) -> nn.Module:
    """A copy with the towers' tensors in `dtype` and the others in `rest`. Tensors that need no cast stay shared until
    `_own`: most of them are only packed, and copies would take memory."""
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
    return copy_module(model, tensors)


def _own(made: nn.Module, model: nn.Module) -> None:
    """Copy the tensors that `made` still shares with `model`."""
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
    """Cast a floating-point tensor, or those in a tuple."""
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _fuse(decoder: TextTransformer | Stack, kind: Callable[..., nn.Module], every: bool) -> None:
    """Fuse the decoder's blocks, replace `every` linear map in float32 (else `pack` does), and give tied logits a map
    of their own."""
    whole = isinstance(decoder, TextTransformer)
    if whole:
        replace_modules(decoder, plain_norm)
        fused = lambda part: FusedBlock(part) if isinstance(part, Block) and can_fuse(part) else part
        replace_modules(decoder.stack.blocks, fused)
    for module in list(decoder.modules()) if every else []:
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(module, name, kind(child.weight, child.bias))
    if whole and decoder.head is None:
        decoder.head = _tied_head(decoder, kind)


def _tied_head(tower: TextTransformer, kind: Callable[..., nn.Module]) -> nn.Module:
    """Logits through the embedding."""
    weight, scale = tower.embed.weight.detach(), tower.config.logit_scale
    return kind(weight if scale == 1 else weight * scale, tower.tied_bias)
