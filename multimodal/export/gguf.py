"""GGUF files for llama.cpp through the `gguf` library: a decoder's configuration, tensors and vocabulary. Each is read
again before it takes its place."""

import errno
import json
import math
import os
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.blocks.positions import interpolated
from multimodal.errors import CheckpointError, UsageError
from multimodal.export.hf.configs import described, halved, plain
from multimodal.export.hf.files import begin_id, control_names
from multimodal.export.refusals import differences, short_window
from multimodal.system.outputs import Outputs, opened_output
from multimodal.tasks.text.generate import end_ids
from multimodal.tokens.text.hub.gguf_vocabulary import CONTROL, NORMAL, SPLITS, USER, WHOLE, gguf_tokenizer
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.folder import Checkpoint
from multimodal.weights.load import families
from multimodal.weights.table import Tensors
from multimodal.weights.text.decoders.gguf_models import KINDS, NAMES, PAIRED, POOLINGS, gguf_checkpoint

ARCHITECTURES = {kind: arch for arch, (_, kind) in KINDS.items()}
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}
UNUSED = 5  # type of a token that no text has
PHI3 = {"<s>", "</s>", "<unk>", "<|endoftext|>"}  # without these, llama.cpp loads no model whose name has phi3 or phi-3
UNTIED = ("olmo2", "stablelm")  # llama.cpp ties no head of these to the embedding
WINDOWED = ("gemma2", "gemma3")  # llama.cpp switches phi3's window off, and reads none of others
PROBES = (
    "The cat's 1999 dogs, don't", "  two  blanks\n\n\tand 日本語 😀 é", "x=3.14;IT'S", "a",
    "HTMLPage's 1234567 (so) ½Ⅷ٣", "if (x) {\n\t!/\n  return 'Ll'; \r\n\n }  \n", "नमस्ते",
)  # fmt: skip


def check_gguf(checkpoint: Checkpoint, target: Path, overwrite: bool) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors by transformers' names. Raises UsageError for a model or vocabulary that GGUF does not hold,
    and a file that exists."""
    Outputs([checkpoint.source], overwrite).claim(target)
    config, tensors = described(checkpoint, ARCHITECTURES)
    arch = ARCHITECTURES[config["model_type"]]
    if (window := short_window(checkpoint.model.config)) and arch not in WINDOWED:
        known = " and ".join(WINDOWED)
        raise UsageError(f"model {checkpoint.source}: llama.cpp has windows for {known} (got one of {window} tokens)")
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    fields = {f"{arch}.{theirs}": config[ours] for theirs, ours in NAMES.items() if config.get(ours) is not None}
    fields[f"{arch}.attention.value_length"] = config["head_dim"]  # llama.cpp takes width / heads otherwise
    fields[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    fields |= _scaling(checkpoint, arch, rope)
    if rope["rope_type"] == "llama3":
        tensors["rope.freqs.weight"] = _divisors(checkpoint)
    if (share := rope.get("partial_rotary_factor", 1)) != 1:
        fields[f"{arch}.rope.dimension_count"] = round(config["head_dim"] * share)
    if "layer_norm_eps" in config:
        fields[f"{arch}.attention.layer_norm_epsilon"] = config["layer_norm_eps"]
    if (pooling := checkpoint.card.get("pooling")) is not None:
        numbers = {name: number for number, name in POOLINGS.items()}
        if pooling not in numbers:
            known = ", ".join(numbers)
            raise UsageError(f"model {checkpoint.source}: GGUF has no pooling {pooling!r:.40} (one of {known})")
        fields[f"{arch}.pooling_type"] = numbers[pooling]
    fields |= _vocabulary(checkpoint.required_tokenizer(), checkpoint)
    if checkpoint.chat is not None:
        fields["tokenizer.chat_template"] = checkpoint.chat.template
    name = Path(checkpoint.source).stem
    if not set(fields["tokenizer.ggml.tokens"]) >= PHI3:
        name = re.sub("phi-?3", "Phi 3", name, flags=re.IGNORECASE)
    return {"general.architecture": arch, "general.name": name} | fields, tensors


def _scaling(checkpoint: Checkpoint, arch: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Fields of the rotary scaling. Raises UsageError for one that llama.cpp does not compute."""
    kind, positions = rope["rope_type"], checkpoint.model.config.positions
    if kind == "default" or (kind == "llama3" and arch == "llama"):
        return {}
    if kind not in ("linear", "yarn"):
        raise UsageError(f"model {checkpoint.source}: GGUF export does not support {kind} scaling of {arch}")
    made = {"type": kind, "factor": rope["factor"]}
    if kind == "yarn":
        fast, slow, made["original_context_length"], whole = positions.yarn
        gain = 0.1 * math.log(rope["factor"]) + 1
        if (fast, slow, whole) != (32, 1, True) or not math.isclose(positions.gain, gain, rel_tol=1e-6):
            raise UsageError(f"model {checkpoint.source}: llama.cpp's YaRN has bounds 32 and 1, and gain {gain:.4g}")
    return {f"{arch}.rope.scaling.{name}": value for name, value in made.items()}


def _divisors(checkpoint: Checkpoint) -> Tensor:
    """Divisors of the rates in Llama 3.1's scaling."""
    own = checkpoint.model.config.positions
    width = checkpoint.model.config.stack.block.attention.head_size
    rates = own.theta ** (-torch.arange(0, width, 2).float() / width)
    return 1 / interpolated(rates, own.scale, own.turns)


def write_gguf(checkpoint: Checkpoint, fields: dict[str, Any], tensors: Tensors, target: Path, store: str) -> None:
    """Write the file. Raises UsageError if it would not give the model back."""
    import gguf

    arch, config = fields["general.architecture"], checkpoint.model.config
    number = next(one for one in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[one] == arch)
    names = gguf.get_tensor_name_map(number, config.stack.layers)
    with opened_output(target) as file:
        out = gguf.GGUFWriter(file.name, arch)
        for key, value in fields.items():
            if key != "general.architecture":
                out.add_key_value(key, value, _type(value))
        for name, tensor in tensors.items():
            if config.tied and name == "lm_head.weight" and arch not in UNTIED:
                continue
            own = _as_gguf(arch, name, tensor, config.stack.block.attention).float().numpy()
            fits = own.ndim == 2 and (store != "int8" or own.shape[1] % 32 == 0)
            kind = gguf.GGMLQuantizationType[TYPES[store] if fits else "F32"]
            theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
            out.add_tensor(theirs, gguf.quants.quantize(own, kind), raw_dtype=kind)
        try:
            with closing(out):
                out.write_header_to_file()
                out.write_kv_data_to_file()
                out.write_tensors_to_file()
        except OSError as error:  # numpy's, which counts elements, has no number
            number = error.errno or errno.ENOSPC
            raise OSError(number, os.strerror(number), str(target)) from None
        try:
            read = gguf_checkpoint(Path(file.name), families)
        except CheckpointError as error:
            raise UsageError(f"model {checkpoint.source}: GGUF does not hold it ({str(error)[-120:]})") from None
        back, own = read.model.config, halved(config, {})[0]
        if config.positions.turns:  # read as divisors
            own = replace(own, positions=replace(
                own.positions, scale=1.0, turns=None, factors=back.positions.factors,
                long_factors=back.positions.factors, trained=back.positions.trained))  # fmt: skip
        made = plain(replace(back, tied=True) if config.tied and arch in UNTIED else back)
        if lost := differences(made, plain(own), rounding=1e-6):  # numbers have 32 bits there
            told = ", ".join(lost[:2])
            raise UsageError(f"model {checkpoint.source}: GGUF's {arch} lacks some of its options ({told})")


def _type(value: Any) -> Any:
    from gguf import GGUFValueType as Kind

    if isinstance(value, list):
        return Kind.ARRAY
    return {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}[type(value)]


def _as_gguf(arch: str, name: str, tensor: Tensor, attention: Any) -> Tensor:
    """The tensor as llama.cpp's converter writes it."""
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if arch in PAIRED and (found := re.search(r"\.([qk])_proj\.", name)):
        heads = attention.heads if found[1] == "q" else attention.key_heads
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor


def _vocabulary(tokenizer: Tokenizer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields of the vocabulary. Raises UsageError for one whose way to split words GGUF has no name for."""
    config, chat = checkpoint.model.config, checkpoint.chat
    ends = dict.fromkeys(i for i in (tokenizer.eos_id, *end_ids(checkpoint)) if i is not None)
    if len(ends) > 3 or (config.causal and not ends):  # llama.cpp ends texts at token 11 or 2 otherwise
        raise UsageError(f"model {checkpoint.source}: GGUF holds one to three tokens that end a text (got {len(ends)})")
    bos = begin_id(checkpoint)
    made: dict[str, Any] = {f"{name}_token_id": i for name, i in zip(("eos", "eot", "eom"), ends, strict=False)}
    made |= {} if bos is None else {"bos_token_id": bos}
    made |= {"padding_token_id": tokenizer.pad_id, "add_bos_token": tokenizer.bos_id is not None}
    made |= {"add_eos_token": True} if tokenizer.puts_end else {}
    kinds, probes, words = list[dict[str, Any]](), PROBES, _words(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        if chat and tokenizer.prepend_scheme == "first":
            raise UsageError(f"model {checkpoint.source}: llama.cpp puts a space behind each control token")
        own = _pieces(tokenizer, config.vocabulary)
        kinds = [made | own]
        named = zip(own["tokens"], own["token_type"], strict=True)
        probes += tuple(f"a {token} b" for token, kind in named if kind == USER)
    elif (pipeline := tokenizer.pipeline()) is not None and pipeline["model"]["type"] == "BPE":
        own = made | _bytes(tokenizer, pipeline, config.vocabulary)
        probes += () if pipeline.get("normalizer") else ("e\u0301",)  # of NFC, only Qwen 2's comes back
        kinds = [own | {"pre": split} for split in SPLITS if split != "default"]
        kinds.sort(key=lambda own: (own["pre"] in WHOLE) is not pipeline["model"].get("ignore_merges", False))
    for own in kinds:
        fields = {f"tokenizer.ggml.{name}": value for name, value in own.items()}
        try:
            read = gguf_tokenizer(Path(checkpoint.source), fields, config.vocabulary, config.context)
        except CheckpointError:
            continue
        if _words(read) == words and all(read.encode(text) == tokenizer.encode(text) for text in probes):
            return fields
    raise UsageError(f"model {checkpoint.source}: GGUF has no vocabulary like its {type(tokenizer).__name__}")


def _words(tokenizer: Tokenizer) -> list[list[str]] | None:
    """Words of the probes, which tokens of a small vocabulary do not tell."""
    from tokenizers import Tokenizer as Backend

    if (pipeline := tokenizer.pipeline()) is None:
        return None
    model = {"type": "BPE", "vocab": {}, "merges": []}
    split = Backend.from_str(json.dumps(pipeline | {"model": model, "added_tokens": []})).pre_tokenizer
    return [[word for word, _ in split.pre_tokenize_str(text)] if split else [text] for text in PROBES]


def _bytes(tokenizer: Tokenizer, pipeline: dict[str, Any], size: int) -> dict[str, Any]:
    names = [f"[PAD{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    for token, i in pipeline["model"]["vocab"].items():
        names[i], kinds[i] = token, NORMAL
    for one in pipeline["added_tokens"]:
        names[one["id"]], kinds[one["id"]] = one["content"], USER
    for token, i in control_names(tokenizer).items():
        names[i], kinds[i] = token, CONTROL
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in pipeline["model"]["merges"]]
    if not merges:
        raise UsageError("GGUF has no vocabulary of bytes alone, which the tokenizer has")
    return {"model": "gpt2", "tokens": names, "token_type": kinds, "merges": merges}


def _pieces(tokenizer: SentencePieceTokenizer, size: int) -> dict[str, Any]:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto.FromString(tokenizer.proto())
    pieces = [(one.piece, one.score, one.type) for one in model.pieces]
    pieces += [(f"[PAD{i}]", 0.0, UNUSED) for i in range(len(pieces), size)]
    tokens, scores, kinds = (list(column) for column in zip(*pieces, strict=True))
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds,
            "add_space_prefix": model.normalizer_spec.add_dummy_prefix}  # fmt: skip
