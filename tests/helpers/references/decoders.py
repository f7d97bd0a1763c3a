"""Tiny random GPT-2 and Llama models of transformers, and Meta's layout of them, for test_weights_gpt.py."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.weights.family import Family
from multimodal.weights.text import gpt2, llama
from tests.helpers.references.case import Case
from tests.helpers.references.vision import randomized

VOCABULARY, CONTEXT = 53, 24


def _case(family: Family, model: nn.Module) -> Case:
    model = randomized(model)
    config = {key: value for key, value in model.config.to_dict().items() if key != "architectures"}
    return Case(family, config | {"architectures": [type(model).__name__]}, model, model.state_dict())


def gpt2_case(head: bool = True, **options: Any) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 24, "n_layer": 3, "n_head": 3}
    config = GPT2Config(**sizes | {"bos_token_id": 1, "eos_token_id": 1} | options)
    return _case(gpt2.FAMILY if head else gpt2.BARE, (GPT2LMHeadModel if head else GPT2Model)(config))


LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}  # fmt: skip


def llama_case(scaling: dict[str, Any] | None = None, **options: Any) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 500.0} | (scaling or {})
    return _case(llama.LLAMA_HF, LlamaForCausalLM(LlamaConfig(**LLAMA | {"rope_parameters": rope} | options)))


def mistral_case(window: int | None) -> Case:
    from transformers import MistralConfig, MistralForCausalLM

    return _case(llama.LLAMA_HF, MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=window)))


def qwen2_case(**options: Any) -> Case:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return _case(llama.LLAMA_HF, Qwen2ForCausalLM(Qwen2Config(**LLAMA | options)))


def meta_case(**options: Any) -> Case:
    """Weights of a Hugging Face model in Meta's layout."""
    made = llama_case(**options)
    config, names = made.config, {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attention_norm", "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "",
    }  # fmt: skip
    tensors = {}
    for name, tensor in made.held.items():
        turned = ".q_proj" in name or ".k_proj" in name
        for theirs, other in names.items():
            name = name.replace(theirs, other)
        tensors[name] = neighbours(tensor, config["head_dim"]) if turned else tensor
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "vocab_size": -1, "max_seq_len": CONTEXT,
        "norm_eps": config["rms_norm_eps"], "rope_theta": 500.0, "multiple_of": 4, "ffn_dim_multiplier": 1.3,
    }  # fmt: skip
    if config["tie_word_embeddings"]:
        params["tied_output"] = True
    return Case(llama.LLAMA, params, made.reference, tensors)


def neighbours(weight: Tensor, head: int) -> Tensor:
    """Interleave the halves of rotated rows: the inverse of Hugging Face's conversion."""
    return weight.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).flatten(0, 2)


CASES: dict[str, Callable[[], Case]] = {
    "GPT-2": gpt2_case,
    "GPT-2, own head": lambda: gpt2_case(
        tie_word_embeddings=False, n_inner=40, activation_function="relu", scale_attn_weights=False,
    ),
    "GPT-2, no head": lambda: gpt2_case(head=False, tie_word_embeddings=False, activation_function="gelu"),
    "Llama": llama_case,
    "Llama, tied, biased": lambda: llama_case(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=6, num_key_value_heads=1,
    ),
    "Llama, linear": lambda: llama_case({"rope_type": "linear", "factor": 4.0}, num_key_value_heads=6),
    "Llama 3.1": lambda: llama_case(
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 512}, num_attention_heads=2, head_dim=20, num_key_value_heads=1,
    ),
    "Qwen2, window above": lambda: qwen2_case(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Mistral": lambda: mistral_case(4),
    "Qwen2": qwen2_case,
    "Qwen2, tied, window": lambda: qwen2_case(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=0,
    ),
    "Llama, biased attention": lambda: llama_case(attention_bias=True),
    "Llama, Meta's": meta_case,
    "Llama, Meta's, tied": lambda: meta_case(tie_word_embeddings=True),
}  # fmt: skip


@lru_cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()


def slow_llama(tensors: dict[str, Tensor], params: dict[str, Any], ids: list[int]) -> Tensor:
    """Logits [T V] of Meta's model, written out one token and head at a time."""
    heads, kv_heads = params["n_heads"], params["n_kv_heads"]
    width = params["dim"] // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + params["norm_eps"]).sqrt() * tensors[name + ".weight"]

    def turned(x: Tensor, at: int) -> Tensor:
        """Rotate each pair of neighbours, as a complex number, by e^(i·at·rate)."""
        for pair in range(width // 2):
            angle = torch.tensor(at * params["rope_theta"] ** (-2 * pair / width))
            a, b = x[2 * pair].clone(), x[2 * pair + 1].clone()
            x[2 * pair], x[2 * pair + 1] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return x

    xs = [tensors["tok_embeddings.weight"][i] for i in ids]
    for layer in range(params["n_layers"]):

        def linear(x: Tensor, name: str, layer: int = layer) -> Tensor:
            return tensors[f"layers.{layer}.{name}.weight"] @ x

        inner = [norm(x, f"layers.{layer}.attention_norm") for x in xs]
        for head in range(heads):
            own, shared = (slice(h * width, (h + 1) * width) for h in (head, head // (heads // kv_heads)))
            keys = [turned(linear(x, "attention.wk")[shared], at) for at, x in enumerate(inner)]
            values = [linear(x, "attention.wv")[shared] for x in inner]
            out = tensors[f"layers.{layer}.attention.wo.weight"][:, own]
            for at, x in enumerate(inner):
                query = turned(linear(x, "attention.wq")[own], at)
                weights = torch.stack([query @ key for key in keys[: at + 1]]).div(width**0.5).softmax(0)
                xs[at] = xs[at] + out @ sum(w * v for w, v in zip(weights, values, strict=False))
        for at, x in enumerate(xs):
            x = norm(x, f"layers.{layer}.ffn_norm")
            hidden = F.silu(linear(x, "feed_forward.w1")) * linear(x, "feed_forward.w3")
            xs[at] = xs[at] + linear(hidden, "feed_forward.w2")
    return torch.stack([tensors["output.weight"] @ norm(x, "norm") for x in xs])
