"""Decoders in GGUF files of llama.cpp: their metadata as the Hugging Face configuration, their tensors under Hugging
Face's names, which the family then reads.

Traps: Llama's query and key rows are in Meta's order, as rotated pairs. Gemma's norms hold 1 + weight. Llama 3.1's and
Phi-3's divisors of the rates are tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.tokens.chat.format import ChatFormat
from multimodal.tokens.text.hub.gguf_vocabulary import end_ids, gguf_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.files.gguf_file import read_gguf
from multimodal.weights.folder import Checkpoint, build
from multimodal.weights.table import Tensors

# of `general.architecture`: the family, and its `model_type`
KINDS = {
    "llama": ("llama-hf", "llama"), "qwen2": ("llama-hf", "qwen2"), "qwen3": ("qwen3", "qwen3"),
    "gemma": ("gemma", "gemma"), "gemma2": ("gemma2", "gemma2"), "gemma3": ("gemma3_text", "gemma3_text"),
    "phi3": ("phi3", "phi3"), "olmo2": ("olmo2", "olmo2"), "granite": ("granite", "granite"),
    "smollm3": ("smollm3", "smollm3"), "stablelm": ("stablelm", "stablelm"), "starcoder2": ("starcoder2", "starcoder2"),
}  # fmt: skip
NAMES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling", "attention.scale": "attention_multiplier",
    "use_parallel_residual": "use_parallel_residual", "attention.causal": "is_causal",
}  # fmt: skip
NEAR = {"rope.freq_base_swa": "rope_local_base_freq"}
MORE = {"gemma3": NEAR, "olmo2": NEAR | {"attention.sliding_window_pattern": "layer_types"}}  # by architecture
YARN = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow",
        "rope.scaling.yarn_attn_factor": "attention_factor"}  # fmt: skip
COUNTS = ("context_length", "embedding_length", "block_count", "attention.head_count")  # of every file
# those that say nothing more about the computation
NEUTRAL = ("vocab_size", "attention.value_length", "rope.dimension_count", "attention.layer_norm_epsilon",
           "pooling_type", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length",
           "rope.scaling.attn_factor", "rope.scaling.type", "rope.scaling.factor")  # fmt: skip
POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # by llama.cpp's numbers; 0 is none
WIDEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27 B models, which divide scores by √(width / heads)
EMBEDDING, HEAD, RATES = "token_embd.weight", "output.weight", ("rope_factors_short.weight", "rope_factors_long.weight")
PAIRED = ("llama", "granite", "smollm3")  # llama.cpp turns neighbouring numbers of these, not halves


def gguf_checkpoint(path: Path, families: Callable[[], Mapping[str, Family]]) -> Checkpoint:
    """`families`: those that are known, by name. Raises CheckpointError for an architecture, option, number type or
    vocabulary that is not supported, and a damaged file."""
    tensors, fields = read_gguf(path)
    arch = fields.get("general.architecture")
    if arch not in KINDS or EMBEDDING not in tensors:
        raise CheckpointError(f"{path}: GGUF of architecture {arch!r:.40} is not supported (one of {', '.join(KINDS)})")
    family = families()[_kind(arch, fields)[0]]
    with family.naming(str(path)):
        config = _config(path, arch, fields, tensors)
        renamed = _renamed(path, arch, family, config, tensors)
    made = family.load(renamed, config, str(path))
    tokenizer = gguf_tokenizer(path, fields, made.model.config.vocabulary, made.model.config.context)
    if not (made.model.config.causal or tokenizer.puts_end):
        tokenizer.eos_id = None  # which encoders get after a text
    card = made.card | {"format": f"gguf ({family.name})"} | _vectors(path, arch, fields)
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if ordinary := [i for i in ends if type(i) is int and i not in tokenizer.control_names.values()]:
        card["generation"] = {"eos_token_id": ordinary}
    return Checkpoint(made.model, tokenizer, None, str(path), card, chat=_chat(fields, tokenizer))


def _kind(arch: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Family and `model_type`. Trap: OLMo 3, which has windows, is written as olmo2."""
    return ("olmo3", "olmo3") if fields.get("olmo2.attention.sliding_window") else KINDS[arch]


def _vectors(path: Path, arch: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Pooling of an embedding model, whose vectors llama.cpp scales to length 1."""
    if not (kind := fields.get(name := f"{arch}.pooling_type")):
        return {}
    if type(kind) is not int or kind not in POOLINGS:
        raise CheckpointError(f"{path}: {name} {kind!r:.40} is not supported (0 to {max(POOLINGS)})")
    return {"pooling": POOLINGS[kind], "normalize": True}


def _config(path: Path, arch: str, fields: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    own = {name.removeprefix(f"{arch}."): value for name, value in fields.items() if name.startswith(f"{arch}.")}
    names = NAMES | MORE.get(arch, {})
    if unknown := sorted(name for name in own.keys() - names.keys() - {*NEUTRAL, *YARN} if own[name]):
        raise CheckpointError(f"{path}: {arch}.{unknown[0]} {own[unknown[0]]!r:.40} is not supported")
    for name in COUNTS:
        if type(own.get(name)) is not int or own[name] < 1:
            raise CheckpointError(f"{path}: {arch}.{name}: expected a number above 0 (got {own.get(name)!r:.40})")
    config = {"rope_theta": 10000.0} | {ours: own[name] for name, ours in names.items() if name in own}
    if config.get("sliding_window") == 0:  # Phi-4's
        config["sliding_window"] = None
    if isinstance(pattern := config.get("layer_types"), list):
        config["layer_types"] = [("full_attention", "sliding_attention")[bool(slides)] for slides in pattern]
    config |= {"model_type": _kind(arch, fields)[1], "vocab_size": len(tensors[EMBEDDING]),
               "tie_word_embeddings": HEAD not in tensors, "architectures": ["GGUFForCausalLM"]}  # fmt: skip
    if eps := own.get("attention.layer_norm_epsilon"):
        config |= {"layer_norm_eps": eps, "norm_epsilon": eps}
    biased = "blk.0.attn_q.bias" in tensors
    if arch == "stablelm":
        config["use_qkv_bias"] = biased
    if arch == "llama":
        config |= {"attention_bias": biased, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    width = config["hidden_size"] // config["num_attention_heads"]
    head = config.setdefault("head_dim", width)
    if (turned := own.get("rope.dimension_count")) and turned != head:
        config["partial_rotary_factor"] = turned / head
    if arch == "granite":
        if own.get("rope.scaling.finetuned") is False:
            raise CheckpointError(f"{path}: granite.rope.scaling.finetuned False (no positions) is not supported")
        plain = {"attention_multiplier": head**-0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
        config |= {name: config.get(name) or value for name, value in plain.items()}  # 0 is none, as in llama.cpp
    if arch in WIDEST:
        config["query_pre_attn_scalar"] = width if config["num_hidden_layers"] == WIDEST[arch] else head
    return config | _rope(path, own, config, tensors)


def _rope(path: Path, own: dict[str, Any], config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Trap: llama.cpp takes a factor without a type as linear, one of 0 as none."""
    kind, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor") or 1.0
    trained, gain = own.get("rope.scaling.original_context_length"), own.get("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(f"{path}: rope.scaling.type {kind!r:.40} is not supported (one of none, linear, yarn)")
    scaled = kind != "none" and factor != 1.0
    if RATES[0] not in tensors and gain != 1.0:
        raise CheckpointError(f"{path}: rope.scaling.attn_factor {gain!r:.40} is not supported (must be 1)")
    if scaled and (kind == "longrope" or {"rope_freqs.weight", *RATES} & tensors.keys()):
        raise CheckpointError(f"{path}: rope.scaling.factor {factor!r:.40} beside rates in tensors is not supported")
    if "rope_freqs.weight" in tensors:  # Llama 3.1's: the same divisors for all lengths
        rates = tensors.pop("rope_freqs.weight").tolist()
        return {"rope_scaling": {"rope_type": "longrope", "short_factor": rates, "long_factor": rates,
                                 "attention_factor": 1.0, "original_max_position_embeddings": 1 << 30}}  # fmt: skip
    if RATES[0] in tensors:
        short, long = (tensors.pop(name).tolist() for name in RATES)
        return {"original_max_position_embeddings": trained, "rope_scaling": {
            "rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": gain}}  # fmt: skip
    more = {"original_max_position_embeddings": trained} if kind == "yarn" else {}
    more |= {ours: own[name] for name, ours in YARN.items() if name in own and kind == "yarn"}
    scaling = {"rope_type": kind, "factor": factor, **more} if scaled else {}
    if config["model_type"] == "olmo3":
        far = {"rope_type": "default", "rope_theta": (theta := config["rope_theta"])} | scaling
        near = {"rope_theta": config.get("rope_local_base_freq", theta)}
        return {"rope_parameters": {"full_attention": far, "sliding_attention": near}}
    return {"rope_scaling": scaling} if scaling else {}


def _renamed(path: Path, arch: str, family: Family, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """The file's tensors under the names that the family's table gives for this configuration."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(one for one in MODEL_ARCH if MODEL_ARCH_NAMES[one] == arch)
    if (layers := config["num_hidden_layers"]) > len(tensors):
        raise CheckpointError(f"{path}: {arch}.block_count: {layers}, more than its {len(tensors)} tensors can fill")
    model = build(TextTransformer, family.config_from(family.completed(config, {}), tensors), len(tensors))
    known = get_tensor_name_map(number, layers)
    left, made = dict(tensors), {}
    for name in family.export(model):
        theirs = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs in left:
            made[name] = _as_stored(arch, name, left.pop(theirs), config)
    if left:
        raise CheckpointError(f"{path}: unexpected tensor {next(iter(left))!r}")
    return made


def _as_stored(arch: str, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """The tensor as Hugging Face's files hold it."""
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1
    if arch in PAIRED and ((keys := ".k_proj." in name) or ".q_proj." in name):
        count = (keys and config.get("num_key_value_heads")) or config["num_attention_heads"]
        pairs = tensor.unflatten(0, (count, -1, 2))
        return torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).flatten(0, 1)
    return tensor


def _chat(fields: dict[str, Any], tokenizer: Tokenizer) -> ChatFormat | None:
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str) or not template.strip():
        return None
    names = {i: name for name, i in tokenizer.control_names.items()}
    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    told = {f"{name}_token": names.get(own.get(f"{name}_token_id")) for name in ("bos", "eos")}
    return ChatFormat(template, eos=tuple(names[i] for i in end_ids(own, tokenizer.control_names)),
                      tokens={role: name for role, name in told.items() if name is not None})  # fmt: skip
