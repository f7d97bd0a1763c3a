"""OPT (Zhang et al. 2022) in transformers' names.

Traps: learned positions begin at row 2 of their table. Files may lack `model.`. The 350M has norms after its
branches, none at the end, and embeddings of half the width."""

from dataclasses import replace
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.weights.family import activation
from multimodal.weights.table import NameRow
from multimodal.weights.text.decoders.common import SELF, DecoderSpec, changed, families

NAMES = {name: ours for name, ours in SELF.items() if ours != "attention.out"} | {
    "self_attn.out_proj": "attention.out", "fc1": "feed.up", "fc2": "feed.down",
    "self_attn_layer_norm": "attention_branch.norm", "final_layer_norm": "feed_branch.norm",
}  # fmt: skip


def _config(text: dict[str, Any]) -> TextConfig:
    width, after = text["hidden_size"], not text["do_layer_norm_before"]
    inner = text.get("word_embed_proj_dim", width)
    stack = transformer(
        width, text["num_hidden_layers"], text["num_attention_heads"], text["ffn_dim"],
        activation=activation(text, "activation_function"), final_norm=not after,
    )  # fmt: skip
    positions = PositionConfig("learned", first=2)
    made = TextConfig(text["vocab_size"], text["max_position_embeddings"], stack, True, positions=positions)
    made = replace(made, embed_width=inner, narrow=True) if inner != width else made
    return changed(made, {"post_norm": after}, bias=text["enable_bias"])


FAMILY, MODEL = families(DecoderSpec(
    ("opt",), _config, NAMES, {"activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True,
                       "do_layer_norm_before": True, "max_position_embeddings": 2048},
    ends={"embed_tokens": "embed", "final_layer_norm": "stack.norm"}, base="model.decoder.", bare="decoder.",
    only={"_remove_final_layer_norm": (False,),
          "layer_norm_elementwise_affine": (True,)},
    unread=(), others=(
        NameRow("embed_positions.weight", "positions"), NameRow("project_in.weight", "widen.weight"),
        NameRow("project_out.weight", "narrow.weight"),
    ),
))  # fmt: skip
