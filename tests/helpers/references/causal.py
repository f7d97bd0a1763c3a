"""Tiny random decoders of transformers, by family, for test_decoder_families.py."""

from functools import lru_cache
from typing import Any

import torch

from tests.helpers.references.case import Case
from tests.helpers.references.vision import randomized

VOCABULARY, CONTEXT = 53, 24
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 6, "sliding_window": 4, "layer_types": KINDS, "query_pre_attn_scalar": 9}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.3], "long_factor": [1.5, 4.0]}
FALCON = {"num_kv_heads": 2, "ffn_hidden_size": 40}
# family, transformers' name of its classes, options
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", "Qwen3", {"head_dim": 8}),
    "Qwen3, window above": ("qwen3", "Qwen3", {"head_dim": 4, "tie_word_embeddings": True, "attention_bias": True,
                                               "use_sliding_window": True, "sliding_window": 4,
                                               "max_window_layers": 1}),
    "Qwen3, yarn": ("qwen3", "Qwen3", {"head_dim": 8, "rope_parameters": YARN}),
    "SmolLM3, dynamic": ("smollm3", "SmolLM3", {"max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}}),
    "Gemma": ("gemma", "Gemma", {"head_dim": 6}),
    "Gemma 2": ("gemma2", "Gemma2", GEMMA),
    "Gemma 3": ("gemma3_text", "Gemma3Text", GEMMA | {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}}}),
    "Phi-3": ("phi3", "Phi3", {"sliding_window": 5, "original_max_position_embeddings": CONTEXT}),
    "Phi-3, longrope": ("phi3", "Phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "Phi-4 mini": ("phi3", "Phi3", {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True,
                                    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                                        "partial_rotary_factor": 0.75}}),
    "SmolLM3": ("smollm3", "SmolLM3", {"no_rope_layer_interval": 2}),
    "OLMo 2": ("olmo2", "Olmo2", {}),
    "OLMo 3": ("olmo3", "Olmo3", {"sliding_window": 4, "layer_types": KINDS}),
    "Granite": ("granite", "Granite", {"tie_word_embeddings": True, "embedding_multiplier": 12.0,
                                       "logits_scaling": 8.0, "residual_multiplier": 0.22,
                                       "attention_multiplier": 0.4, "attention_bias": True, "mlp_bias": False}),
    "StableLM": ("stablelm", "StableLm", {"num_attention_heads": 3, "num_key_value_heads": 3, "use_qkv_bias": True}),
    "StableLM, parallel": ("stablelm", "StableLm", {"use_parallel_residual": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "GPT-NeoX": ("gpt_neox", "GPTNeoX", {"num_attention_heads": 3}),
    "GPT-NeoX, in turn": ("gpt_neox", "GPTNeoX", {"num_attention_heads": 3, "use_parallel_residual": False,
                                                  "attention_bias": False, "tie_word_embeddings": True}),
    "StarCoder2": ("starcoder2", "Starcoder2", {"sliding_window": 6}),
    "OPT": ("opt", "OPT", {"ffn_dim": 40, "word_embed_proj_dim": 24}),
    "OPT 350M": ("opt", "OPT", {"ffn_dim": 40, "word_embed_proj_dim": 12, "do_layer_norm_before": False}),
    "Falcon-RW": ("falcon", "Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
                                       "num_attention_heads": 4, "num_kv_heads": 4}),
    "Falcon 7B": ("falcon", "Falcon", {}),
    "Falcon 40B": ("falcon", "Falcon", FALCON | {"new_decoder_architecture": True}),
    "Falcon 2": ("falcon", "Falcon", FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "Falcon, biased": ("falcon", "Falcon", {"multi_query": False, "parallel_attn": False, "bias": True,
                                            "tie_word_embeddings": False}),
    "BLOOM": ("bloom", "Bloom", {"n_layer": 3, "n_head": 6}),
}  # fmt: skip


@lru_cache
def case(name: str) -> Case:
    import transformers

    family, kind, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    config._attn_implementation = "eager" if kind in ("Gemma2", "Bloom") else "sdpa"
    own = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    model = randomized(own(config)).eval()
    head = {"lm_head.weight": "embed_out.weight"} if kind == "GPTNeoX" else {}  # as transformers saves it
    held = {head.get(key, key): value for key, value in model.state_dict().items()}
    return Case(family, config.to_dict() | {"architectures": [own.__name__]}, model, held)
