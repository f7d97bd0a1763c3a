"""Sizes in the public config.json files of released models, and their numbers of parameters."""

from typing import Any

_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip


def _llama(
    kind: str, width: int, layers: int, heads: int, keys: int, hidden: int, vocabulary: int, **options: Any
) -> dict[str, Any]:
    sizes = {"model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
             "num_key_value_heads": keys, "intermediate_size": hidden, "vocab_size": vocabulary, "hidden_act": "silu",
             "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}  # fmt: skip
    return sizes | options


def _gemma3(width: int, layers: int, heads: int, hidden: int, window: int, **options: Any) -> dict[str, Any]:
    return _llama("gemma3_text", width, layers, heads, 1, hidden, 262144, head_dim=256, rope_theta=1e6,
                  rope_local_base_freq=10000, sliding_window=window, query_pre_attn_scalar=256,
                  hidden_activation="gelu_pytorch_tanh", **options)  # fmt: skip


def _gpt(kind: str, width: int, layers: int, heads: int, vocabulary: int, **options: Any) -> dict[str, Any]:
    return {"model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "vocab_size": vocabulary} | options  # fmt: skip


GRANITE = {"tie_word_embeddings": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "rope_theta": 1e7}
RELEASED: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen2-0.5B": (_llama("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True, rope_theta=1e6,
                          max_window_layers=24, sliding_window=32768, use_sliding_window=False), 494_032_768),
    "Qwen2.5-7B-Instruct": (_llama("qwen2", 3584, 28, 28, 4, 18944, 152064, rope_theta=1e6, rope_scaling=_YARN,
                                   max_window_layers=28, use_sliding_window=False), 7_615_616_512),
    "Qwen3-0.6B": (_llama("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True,
                          rope_theta=1e6, use_sliding_window=False, sliding_window=None), 596_049_920),
    "Qwen3-8B": (_llama("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128, rope_scaling=None), 8_190_735_360),
    "Llama-3.2-1B": (_llama("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True,
                            rope_theta=5e5, rope_scaling=_LLAMA3), 1_235_814_400),
    "gemma-2b": (_llama("gemma", 2048, 18, 8, 1, 16384, 256000, head_dim=256, hidden_act="gelu",
                        hidden_activation="gelu_pytorch_tanh"), 2_506_172_416),
    "gemma-7b": (_llama("gemma", 3072, 28, 16, 16, 24576, 256000, head_dim=256, hidden_act="gelu"), 8_537_680_896),
    "gemma-2-2b": (_llama("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888),
    "gemma-2-9b": (_llama("gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984),
    "gemma-3-270m": (_gemma3(640, 18, 4, 2048, 512), 268_098_176),
    "gemma-3-1b-it": (_gemma3(1152, 26, 4, 6912, 512), 999_885_952),
    "embeddinggemma-300m": (_gemma3(768, 24, 3, 1152, 512, use_bidirectional_attention=True), 302_863_104),
    "Phi-3-mini-4k-instruct": (_llama("phi3", 3072, 32, 32, 32, 8192, 32064, sliding_window=2047,
                                      original_max_position_embeddings=4096), 3_821_079_552),
    "Phi-3.5-mini-instruct": (_llama("phi3", 3072, 32, 32, 32, 8192, 32064, rope_scaling=_LONG,
                                     original_max_position_embeddings=4096), 3_821_079_552),
    "Phi-4-mini-instruct": (_llama("phi3", 3072, 32, 24, 8, 8192, 200064, rope_scaling=_LONG, tie_word_embeddings=True,
                                   partial_rotary_factor=0.75), 3_836_021_760),
    "phi-4": (_llama("phi3", 5120, 40, 40, 10, 17920, 100352, rope_theta=250000), 14_659_507_200),
    "SmolLM3-3B": (_llama("smollm3", 2048, 36, 16, 4, 11008, 128256, rope_theta=5e6, use_sliding_window=False,
                          no_rope_layers=[1, 1, 1, 0] * 9), 3_075_098_624),
    "OLMo-2-0425-1B": (_llama("olmo2", 2048, 16, 16, 16, 8192, 100352, rope_theta=5e5), 1_484_916_736),
    "OLMo-2-1124-7B": (_llama("olmo2", 4096, 32, 32, 32, 11008, 100352, rope_theta=5e5), 7_298_617_344),
    "granite-3.0-2b-base": (_llama("granite", 2048, 40, 32, 8, 8192, 49155, attention_multiplier=0.015625,
                                   logits_scaling=8.0, **GRANITE), 2_533_531_648),
    "granite-3.0-8b-base": (_llama("granite", 4096, 40, 32, 8, 12800, 49155, attention_multiplier=0.0078125,
                                   logits_scaling=16.0, **GRANITE), 8_170_848_256),
    "pythia-70m": (_gpt("gpt_neox", 512, 6, 8, 50304, intermediate_size=2048, rotary_pct=0.25, rotary_emb_base=10000,
                        max_position_embeddings=2048), 70_426_624),
    "pythia-6.9b": (_gpt("gpt_neox", 4096, 32, 32, 50432, intermediate_size=16384, max_position_embeddings=2048,
                         rotary_pct=0.25), 6_857_302_016),
    "gpt-neox-20b": (_gpt("gpt_neox", 6144, 44, 64, 50432, intermediate_size=24576, hidden_act="gelu_fast",
                          max_position_embeddings=2048, rotary_pct=0.25), 20_554_567_680),
    "starcoder2-3b": (_llama("starcoder2", 3072, 30, 24, 2, 12288, 49152, hidden_act="gelu_pytorch_tanh",
                             sliding_window=4096), 3_030_371_328),
    "starcoder2-7b": (_llama("starcoder2", 4608, 32, 36, 4, 18432, 49152, hidden_act="gelu_pytorch_tanh",
                             sliding_window=4096), 7_173_923_840),
    "stablelm-2-1_6b": (_llama("stablelm", 2048, 24, 32, 32, 5632, 100352, use_qkv_bias=True, layer_norm_eps=1e-5,
                               partial_rotary_factor=0.25), 1_644_515_328),
    "stablelm-3b-4e1t": (_llama("stablelm", 2560, 32, 32, 32, 6912, 50304, partial_rotary_factor=0.25), 2_795_443_200),
    "opt-125m": (_gpt("opt", 768, 12, 12, 50272, ffn_dim=3072, max_position_embeddings=2048, word_embed_proj_dim=768),
                 125_239_296),
    "opt-6.7b": (_gpt("opt", 4096, 32, 32, 50272, ffn_dim=16384, max_position_embeddings=2048), 6_658_473_984),
    "opt-350m": (_gpt("opt", 1024, 24, 16, 50272, ffn_dim=4096, max_position_embeddings=2048, word_embed_proj_dim=512,
                      do_layer_norm_before=False), 331_196_416),
    "falcon-rw-1b": (_gpt("falcon", 2048, 24, 32, 50304, alibi=True, bias=True, multi_query=False, parallel_attn=False),
                     1_311_625_216),
    "falcon-7b": (_gpt("falcon", 4544, 32, 71, 65024, alibi=False, bias=False, multi_query=True, parallel_attn=True),
                  6_921_720_704),
    "falcon-40b": (_gpt("falcon", 8192, 60, 128, 65024, new_decoder_architecture=True, num_kv_heads=8),
                   41_303_293_952),
    "bloom-560m": ({"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
                    "vocab_size": 250880, "pretraining_tp": 1}, 559_214_592),
    "bloom-7b1": ({"model_type": "bloom", "n_embed": 4096, "n_layer": 30, "num_attention_heads": 32,
                   "vocab_size": 250880, "pretraining_tp": 4}, 7_069_016_064),
    "Mixtral-8x7B-v0.1": (_llama("mixtral", 4096, 32, 32, 8, 14336, 32000, rope_theta=1e6, num_local_experts=8,
                                 num_experts_per_tok=2, sliding_window=None), 46_702_792_704),
}  # fmt: skip
