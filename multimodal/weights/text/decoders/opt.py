"""OPT (Zhang et al. 2022) in transformers' names.

Traps: learned positions begin at row 2 of their table. Files may lack `model.`."""

from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.weights.table import NameRow
from multimodal.weights.text.decoders.common import SELF, DecoderSpec, activation, changed, families

NAMES = {name: ours for name, ours in SELF.items() if ours != "attention.out"} | {
    "self_attn.out_proj": "attention.out", "fc1": "feed.up", "fc2": "feed.down",
    "self_attn_layer_norm": "attention_branch.norm", "final_layer_norm": "feed_branch.norm",
}  # fmt: skip


def _config(text: dict[str, Any]) -> TextConfig:
    """Raises CheckpointError for embeddings of another width, as the 350 M model has."""
    width = text["hidden_size"]
    if (inner := text.get("word_embed_proj_dim", width)) != width:
        raise CheckpointError(f"config.json: word_embed_proj_dim {inner!r} with hidden_size {width} is not supported")
    stack = transformer(
        width, text["num_hidden_layers"], text["num_attention_heads"], text["ffn_dim"],
        activation=activation(text, "activation_function"),
    )  # fmt: skip
    positions = PositionConfig("learned", first=2)
    made = TextConfig(text["vocab_size"], text["max_position_embeddings"], stack, True, positions=positions)
    return changed(made, bias=text["enable_bias"])


FAMILY, MODEL = families(DecoderSpec(
    ("opt",), _config, NAMES, {"activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True},
    ends={"embed_tokens": "embed", "final_layer_norm": "stack.norm"}, base="model.decoder.", bare="decoder.",
    only={"do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
          "layer_norm_elementwise_affine": (True,)},
    unread=(), others=(NameRow("embed_positions.weight", "positions"),),
))  # fmt: skip
