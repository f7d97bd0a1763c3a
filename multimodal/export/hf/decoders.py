"""config.json of decoders, from our configuration. What a family cannot say shows when the result is read again."""

from collections.abc import Callable
from typing import Any

from multimodal.models.text_config import PositionConfig, TextConfig

# transformers' name of an activation that several of ours may have been
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu",
               "quick_gelu": "quick_gelu", "tanh": "tanh"}  # fmt: skip
LLAMA_KIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "olmo3", "gemma", "gemma2",
             "gemma3_text", "phi3", "mixtral", "stablelm", "starcoder2")  # fmt: skip


def rope(own: PositionConfig, head: int) -> dict[str, Any]:
    """`rope_parameters`; `head`: width."""
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": own.theta}
    if own.share:
        made["partial_rotary_factor"] = own.share / head
    if own.turns:
        low, high, trained = own.turns
        kind = {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": trained}  # fmt: skip
    elif own.yarn:
        fast, slow, trained, whole = own.yarn
        kind = {"rope_type": "yarn", "beta_fast": fast, "beta_slow": slow, "truncate": whole,
                "attention_factor": own.gain, "original_max_position_embeddings": trained}  # fmt: skip
    elif own.factors:
        return made | {
            "rope_type": "longrope", "short_factor": list(own.factors), "long_factor": list(own.long_factors),
            "attention_factor": own.gain, "original_max_position_embeddings": own.trained,
        }  # fmt: skip
    elif own.dynamic:
        return made | {"rope_type": "dynamic", "factor": own.dynamic[0]}
    else:
        kind = {"rope_type": "linear"} if own.scale != 1 else {}
    return made | kind | ({"factor": 1 / own.scale} if kind else {})


def part_of(c: TextConfig) -> dict[str, Any]:
    """`rope` of families whose heads turn in part by default."""
    size = c.stack.block.attention.head_size
    share = (c.positions.share or size) / size
    return {"rope_parameters": rope(c.positions, size) | {"partial_rotary_factor": share}}


def body(c: TextConfig) -> dict[str, Any]:
    """Sizes by the names that most families have."""
    block, own = c.stack.block, c.stack.block.attention
    return {
        "vocab_size": c.vocabulary, "max_position_embeddings": c.context, "hidden_size": own.width,
        "intermediate_size": block.hidden, "num_hidden_layers": c.stack.layers, "num_attention_heads": own.heads,
        "hidden_act": ACTIVATIONS.get(block.activation, block.activation), "tie_word_embeddings": c.tied is not False,
    }  # fmt: skip


def llama_kin(c: TextConfig, kind: str) -> dict[str, Any]:
    block, own = c.stack.block, c.stack.block.attention
    feed = own.bias if block.feed_bias is None else block.feed_bias
    eps = {"rms_norm_eps": block.norm_eps} if block.norm != "layer" else {"layer_norm_eps": block.norm_eps}
    made = body(c) | eps | {
        "num_key_value_heads": own.key_heads, "head_dim": own.head_size, "attention_bias": own.bias,
        "mlp_bias": feed, "rope_parameters": rope(c.positions, own.head_size), "sliding_window": c.window,
    }  # fmt: skip
    # a mistral with kinds of layers is read as a Ministral, which CTranslate2 lacks
    if (pattern := c.pattern) is not None or (c.window and kind != "mistral"):
        layers = range(c.stack.layers)
        slide = [pattern is None or layer in pattern.layers for layer in layers]
        made["layer_types"] = [("full_attention", "sliding_attention")[one] for one in slide]
        made["sliding_window"] = c.window if pattern is None else pattern.window
    return made | OWN.get(kind, lambda c: {})(c)


def _gemma(c: TextConfig) -> dict[str, Any]:
    own = c.stack.block.attention
    made = {"hidden_activation": ACTIVATIONS[c.stack.block.activation], "final_logit_softcapping": c.logit_cap,
            "attn_logit_softcapping": own.softcap}  # fmt: skip
    if own.scale is None:
        return made
    scalar = own.scale**-2
    return made | {"query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar}


def _gemma3(c: TextConfig) -> dict[str, Any]:
    made = _gemma(c) | {"use_bidirectional_attention": not c.causal} | _two_ropes(c)
    if not c.causal and c.pattern is not None:
        made["sliding_window"] = 2 * (c.pattern.window - 1)
    return made


def _two_ropes(c: TextConfig) -> dict[str, Any]:
    local, size = c.positions if c.pattern is None else c.pattern.positions, c.stack.block.attention.head_size
    return {"rope_parameters": {"full_attention": rope(c.positions, size), "sliding_attention": rope(local, size)}}


def _smollm3(c: TextConfig) -> dict[str, Any]:
    still = c.pattern.layers if c.pattern is not None else ()
    return {"no_rope_layers": [int(layer not in still) for layer in range(c.stack.layers)],
            "layer_types": ["full_attention"] * c.stack.layers, "use_sliding_window": False}  # fmt: skip


def _granite(c: TextConfig) -> dict[str, Any]:
    return {"embedding_multiplier": c.embed_scale, "logits_scaling": 1 / c.logit_scale,
            "residual_multiplier": c.stack.block.residual_scale,
            "attention_multiplier": c.stack.block.attention.scale}  # fmt: skip


def _windows(c: TextConfig) -> dict[str, Any]:
    """Qwen's windows begin at a layer."""
    window = c.window if c.pattern is None else c.pattern.window
    first = min(c.pattern.layers) if c.pattern is not None else 0 if c.window else c.stack.layers
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}


OWN: dict[str, Callable[[TextConfig], dict[str, Any]]] = {
    "qwen2": _windows, "qwen3": _windows, "gemma": _gemma, "gemma2": _gemma, "gemma3_text": _gemma3,
    "olmo3": _two_ropes, "smollm3": _smollm3, "granite": _granite,
    "phi3": lambda c: {"original_max_position_embeddings": c.positions.trained or c.context,
                       "rope_scaling": None},
    "mixtral": lambda c: {} if c.stack.block.experts is None else {
        "num_local_experts": c.stack.block.experts.count, "num_experts_per_tok": c.stack.block.experts.top},
    "stablelm": lambda c: part_of(c) | {"use_qkv_bias": c.stack.block.attention.bias,
                           "use_parallel_residual": c.stack.block.parallel is not None},
    "starcoder2": lambda c: {"norm_epsilon": c.stack.block.norm_eps, "use_bias": c.stack.block.attention.bias},
}  # fmt: skip


def gpt2(c: TextConfig, kind: str) -> dict[str, Any]:
    block, own = c.stack.block, c.stack.block.attention
    return {
        "vocab_size": c.vocabulary, "n_positions": c.context, "n_embd": own.width, "n_layer": c.stack.layers,
        "n_head": own.heads, "n_inner": block.hidden, "layer_norm_epsilon": block.norm_eps,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(block.activation, block.activation),
        "tie_word_embeddings": c.tied is not False, "scale_attn_weights": own.scale is None,
    }  # fmt: skip


def neox(c: TextConfig, kind: str) -> dict[str, Any]:
    block = c.stack.block
    return body(c) | part_of(c) | {
        "layer_norm_eps": block.norm_eps, "attention_bias": block.attention.bias,
        "use_parallel_residual": block.parallel is not None,
    }  # fmt: skip


def bloom(c: TextConfig, kind: str) -> dict[str, Any]:
    block = c.stack.block
    return {"vocab_size": c.vocabulary, "hidden_size": block.attention.width, "n_layer": c.stack.layers,
            "n_head": block.attention.heads, "layer_norm_epsilon": block.norm_eps, "seq_length": c.context,
            "tie_word_embeddings": c.tied is not False}  # fmt: skip


def opt(c: TextConfig, kind: str) -> dict[str, Any]:
    block = c.stack.block
    return body(c) | {"ffn_dim": block.hidden, "activation_function": body(c)["hidden_act"],
                      "enable_bias": block.attention.bias,
                      "word_embed_proj_dim": c.embed_width or block.attention.width,
                      "do_layer_norm_before": not block.post_norm}  # fmt: skip


def falcon(c: TextConfig, kind: str) -> dict[str, Any]:
    block, own = c.stack.block, c.stack.block.attention
    groups = own.kv_heads not in (None, 1) or block.parallel == "two"
    turned = {} if c.positions.kind == "alibi" else {"rope_parameters": rope(c.positions, own.head_size)}
    return body(c) | {
        "ffn_hidden_size": block.hidden, "activation": body(c)["hidden_act"], "layer_norm_epsilon": block.norm_eps,
        "new_decoder_architecture": groups, "num_kv_heads": own.key_heads,
        "multi_query": own.kv_heads == 1, "parallel_attn": block.parallel is not None, "bias": own.bias,
        "num_ln_in_parallel_attn": {"two": 2, "one": 1}.get(block.parallel) if groups else None,
        "alibi": not turned,
    } | turned  # fmt: skip


DECODERS = {"gpt2": gpt2, "gpt_neox": neox} | dict.fromkeys(LLAMA_KIN, llama_kin) | {
    "bloom": bloom, "opt": opt, "falcon": falcon}  # fmt: skip
