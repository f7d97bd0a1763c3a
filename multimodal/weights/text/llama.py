"""Llama and Mistral in Meta's names (`params.json`) and in those of transformers' LlamaForCausalLM and
MistralForCausalLM (Touvron et al. 2023, Jiang et al. 2023), and Qwen2 and Qwen2.5 (Yang et al. 2024).

Traps: Meta's files rotate neighbouring pairs, Hugging Face's the halves of each head, with their rows reordered, so the
same model differs between the two. `w1` is the gate, `w3` is up, `w2` is down. Qwen2 has biases on query, key and
value alone, and its sliding window begins at a layer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.sentencepiece import is_scored, scored_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.any.chat import chat_format
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, repeat, under
from multimodal.weights.text import bert
from multimodal.weights.text.decoders.common import LLAMA as LAYER
from multimodal.weights.text.decoders.common import changed, directed, tokenizer, windowed
from multimodal.weights.text.decoders.rope import positions

META_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "hidden_dim", "multiple_of", "ffn_dim_multiplier",
    "max_seq_len", "norm_eps", "rope_theta", "tied_output", "head_dim", "sliding_window", "use_scaled_rope",
}  # fmt: skip
# LlamaConfig's defaults; those in which MistralConfig's and Qwen2Config's differ
DEFAULTS = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "tie_word_embeddings": False,
            "attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0, "sliding_window": None,
            "max_position_embeddings": 2048, "model_type": "llama"}  # fmt: skip
OWN = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "use_sliding_window": False, "sliding_window": 4096,
              "max_window_layers": 28, "attention_bias": True, "max_position_embeddings": 32768},
}  # fmt: skip
META, HUGGING_FACE = ("tok_embeddings.weight", "output.weight"), ("model.embed_tokens.weight", "lm_head.weight")


def _config(
    vocabulary: int, context: int, width: int, layers: int, hidden: int, heads: int, kv_heads: int | None,
    head_width: int | None, eps: float, tied: bool, positions: PositionConfig, window: int | None = None,
    bias: bool = False,
) -> TextConfig:  # fmt: skip
    if (head_width or width // heads) % 2:
        raise CheckpointError(f"head width {head_width or width // heads} must be even for rotary positions")
    if head_width is not None and head_width * heads == width:
        head_width = None
    attention = AttentionConfig(width, heads, None if kv_heads == heads else kv_heads, head_width, bias=bias)
    block = BlockConfig(attention, hidden, "silu", gated=True, norm="rms", norm_eps=eps)
    return TextConfig(
        vocabulary, context, StackConfig(block, layers), causal=True, tied=tied, positions=positions, window=window
    )


def meta_config(config: dict[str, Any], tensors: Tensors) -> TextConfig:
    """Raises CheckpointError for an unknown key, and for what neither params.json nor the weights state."""
    if unknown := sorted(config.keys() - META_KEYS):
        raise CheckpointError(f"params.json: unknown key {unknown[0]!r}")
    if config.get("use_scaled_rope"):
        raise CheckpointError("params.json: use_scaled_rope states no factor; use Hugging Face's files")
    if "max_seq_len" not in config:
        raise CheckpointError("params.json: max_seq_len is missing (Llama 2 was trained with 4096, Llama 3 with 8192)")
    theta = config["rope_theta"] if "rope_theta" in config else _theta(tensors)
    return _config(
        config["vocab_size"], config["max_seq_len"], config["dim"], config["n_layers"], config["hidden_dim"],
        config["n_heads"], config.get("n_kv_heads"), config.get("head_dim"), config["norm_eps"],
        _tied(tensors, *META, tied=config.get("tied_output")),
        PositionConfig("rotary", theta=float(theta), interleaved=True), config.get("sliding_window"),
    )  # fmt: skip


def _complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Sizes that params.json leaves to the shapes: a vocabulary of -1, and the hidden width."""
    sizes = {"vocab_size": len(tensors[META[0]]), "hidden_dim": len(tensors["layers.0.feed_forward.w1.weight"])}
    return sizes | {key: value for key, value in config.items() if (key, value) != ("vocab_size", -1)}


def _theta(tensors: Tensors) -> float:
    """Base of the rotation from the frequencies that Meta's older files store instead."""
    rates = tensors.get("rope.freqs")
    if rates is not None and rates.ndim == 1:
        width = 2 * len(rates)
        usual = 10000.0 ** (-torch.arange(0, width, 2).float() / width)
        if torch.allclose(rates.float(), usual, rtol=2**-7, atol=0):  # may be bfloat16
            return 10000.0
    raise CheckpointError("params.json: rope_theta is missing, and the weights do not state it")


def _tied(tensors: Tensors, embedding: str, head: str, tied: bool | None) -> bool:
    """Raises CheckpointError for a tied head that differs from the embedding."""
    if tied and not bert.same(tensors, head, embedding, absent=True):
        raise CheckpointError(f"tensor {head!r} differs from the embedding it should repeat")
    return bool(tied)


def hf_complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return OWN.get(config.get("model_type"), {}) | config


def hf_config(text: dict[str, Any], tensors: Tensors, names: tuple[str, str] = HUGGING_FACE) -> TextConfig:
    """`names`: of the embedding and the head. Raises CheckpointError for unsupported options."""
    if text["hidden_act"] not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act {text['hidden_act']!r} is not supported")
    made = directed(windowed(hf_body(text), text, partial(slides, text)), text)
    if text["model_type"] == "llama" and (made.window or made.pattern):
        raise CheckpointError(f"config.json: layer_types {text['layer_types']!r:.80} of a llama is not supported")
    return replace(made, tied=_tied(tensors, *names, tied=text["tie_word_embeddings"]))


def bare_config(text: dict[str, Any], tensors: Tensors) -> TextConfig:
    """Configuration of a decoder alone, such as an embedding model, whose names lack the prefix."""
    return replace(hf_config(text | {"tie_word_embeddings": True}, tensors), tied=None)


def hf_body(text: dict[str, Any]) -> TextConfig:
    """Sizes, biases and positions, without windows and head, which other families share."""
    made = _config(
        text["vocab_size"], text["max_position_embeddings"], text["hidden_size"], text["num_hidden_layers"],
        text["intermediate_size"], text["num_attention_heads"], text["num_key_value_heads"], text.get("head_dim"),
        text["rms_norm_eps"], False, positions(text), bias=text["attention_bias"],
    )  # fmt: skip
    feed = None if text["mlp_bias"] == text["attention_bias"] else text["mlp_bias"]
    return changed(made, {"feed_bias": feed}, out_bias=text["model_type"] != "qwen2")


def slides(text: dict[str, Any], layer: int) -> bool:
    """Return True if a layer without `layer_types` sees `sliding_window` tokens alone."""
    if "use_sliding_window" in text:  # Qwen2 and 3
        return bool(text["use_sliding_window"]) and layer >= text["max_window_layers"]
    return text["model_type"] in ("mistral", "mixtral")


def _rows(config: TextConfig, prefix: str, names: dict[str, str], ends: dict[str, str], head: tuple[str, str],
          dropped: NameRow) -> list[NameRow]:  # fmt: skip
    """`names`: parts of a layer, foreign and ours."""
    own = config.stack.block
    feed = own.attention.bias if own.feed_bias is None else own.feed_bias
    biased = {"attention.out": own.attention.bias and own.attention.out_bias}
    biased |= {f"attention.{part}": own.attention.bias for part in ("query", "key", "value")}
    biased |= {f"feed.{part}": feed for part in ("gate", "up", "down")}
    logits = {None: [], True: [repeat(head[1], head[0])], False: [NameRow(head[1], "head.weight")]}[config.tied]
    block = [
        NameRow(f"{theirs}.{kind}", f"{ours}.{kind}")
        for theirs, ours in names.items()
        for kind in (("weight", "bias") if biased.get(ours) else ("weight",))
    ]
    return [
        *under(prefix, "stack.blocks.{}.", block),
        *(NameRow(theirs, own) for theirs, own in ends.items()),
        *logits,
        dropped,
    ]


def meta_rows(config: TextConfig) -> list[NameRow]:
    names = {
        "attention.wq": "attention.query", "attention.wk": "attention.key", "attention.wv": "attention.value",
        "attention.wo": "attention.out", "feed_forward.w1": "feed.gate", "feed_forward.w3": "feed.up",
        "feed_forward.w2": "feed.down", "attention_norm": "attention_branch.norm", "ffn_norm": "feed_branch.norm",
    }  # fmt: skip
    ends = {META[0]: "embed.weight", "norm.weight": "stack.norm.weight"}
    rates = NameRow("rope.freqs", reason="follows from rope_theta", optional=True)
    return _rows(config, "layers.{}.", names, ends, META, rates)


def hf_rows(config: TextConfig, base: str = "model.", head: str = HUGGING_FACE[1]) -> list[NameRow]:
    """`base`: prefix of all names but the head's."""
    embedding = f"{base}embed_tokens.weight"
    ends = {embedding: "embed.weight", f"{base}norm.weight": "stack.norm.weight"}
    rates = NameRow(f"{base}layers.{{}}.self_attn.rotary_emb.inv_freq", reason="follows from rope_theta", optional=True)
    return _rows(config, f"{base}layers.{{}}.", LAYER, ends, (embedding, head), rates)


def meta_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    size, context = config["vocab_size"], config["max_seq_len"]
    if folder is not None and (path := folder / "tokenizer.json").is_file() and is_scored(path):
        return scored_tokenizer(path, size, context)
    return hub_tokenizer(folder, {"model_type": "llama"} | config, size, context)


LLAMA = Family(
    "llama", TextTransformer, (META[0], "layers.0.attention.wq.weight"), meta_config, meta_rows, meta_tokenizer,
    complete=_complete, needs="params.json",
)  # fmt: skip
LLAMA_HF = Family(
    "llama-hf", TextTransformer,
    (HUGGING_FACE[0], "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"),
    hf_config, hf_rows, tokenizer, complete=hf_complete, needs="config.json", defaults=DEFAULTS,
    types=("", "llama", "mistral", "qwen2"), chat=chat_format,
)  # fmt: skip
LLAMA_BARE = replace(
    LLAMA_HF, name="llama-hf-model", has=tuple(name.removeprefix("model.") for name in LLAMA_HF.has),
    config_from=bare_config, rows=partial(hf_rows, base=""), types=("llama", "mistral", "qwen2"),
)  # fmt: skip
