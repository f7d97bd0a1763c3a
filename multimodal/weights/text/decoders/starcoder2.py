"""StarCoder2 (Lozhkov et al. 2024) in transformers' names: layer norms, and one feed-forward map up and one down."""

from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.family import activation
from multimodal.weights.text import llama
from multimodal.weights.text.decoders.common import NORMS, SELF, DecoderSpec, changed, families, windowed


def _config(text: dict[str, Any]) -> TextConfig:
    bias = text["use_bias"]
    text = text | {"rms_norm_eps": text["norm_epsilon"], "attention_bias": bias, "mlp_bias": bias, "layer_types": None}
    block = {"norm": "layer", "gated": False, "activation": activation(text, "hidden_act")}
    return windowed(changed(llama.hf_body(text), block), text, lambda layer: True)


FAMILY, MODEL = families(DecoderSpec(
    ("starcoder2",), _config, SELF | NORMS | {"mlp.c_fc": "feed.up", "mlp.c_proj": "feed.down"},
    llama.DEFAULTS | {"norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 2,
                      "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096},
))  # fmt: skip
