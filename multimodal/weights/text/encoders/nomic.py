"""NomicBERT (Nussbaum et al. 2024): nomic-embed-text's files, which transformers' NomicBertModel reads and writes.

Traps: a block's norms follow each sum. There is no bias but the norms'. `fc12` is the gate, `fc11` is up. The files'
config.json has GPT-2's names and options of its own code, which is never run."""

from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.weights.family import Family
from multimodal.weights.table import THIRDS, NameRow, Tensors, linears, qkv, under, weight_and_bias
from multimodal.weights.text import bert
from multimodal.weights.text.decoders.common import changed
from multimodal.weights.text.decoders.rope import positions

# GPT-2's names, and those of NomicBertConfig
NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
         "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "rotary_emb_base": "rope_theta",
         "layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act"}  # fmt: skip
DEFAULTS = {"vocab_size": 30528, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "max_position_embeddings": 2048, "type_vocab_size": 2, "rope_theta": 1000.0,
            "layer_norm_eps": 1e-12, "hidden_act": "silu"}  # fmt: skip
ONLY = {"hidden_act": ("silu", "swiglu"), "prenorm": (False,), "parallel_block": (False,), "qkv_proj_bias": (False,),
        "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,), "rotary_emb_fraction": (1.0,), "causal": (False,),
        "rotary_emb_interleaved": (False,), "use_rms_norm": (False,), "moe_every_n_layers": (0,),
        "rotary_scaling_factor": (None,), "rotary_emb_scale_base": (None,), "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,), "position_embedding_type": ("absolute",)}  # fmt: skip
EMBEDDING = "embeddings.word_embeddings.weight"
BLOCK = {"attn.out_proj": "attention.out", "mlp.fc11": "feed.up", "mlp.fc12": "feed.gate", "mlp.fc2": "feed.down",
         "norm1": "attention_branch.norm", "norm2": "feed_branch.norm"}  # fmt: skip


def config_from(text: dict[str, Any], tensors: Tensors) -> TextConfig:
    """Raises CheckpointError for unsupported options, by name and value."""
    for key, values in ONLY.items():
        if (value := text.get(key, values[0])) not in (*values, None):
            raise CheckpointError(f"config.json: {key} {value!r} is not supported")
    stack = transformer(
        text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"], text["intermediate_size"],
        activation="silu", norm_eps=text["layer_norm_eps"], final_norm=False,
    )  # fmt: skip
    made = TextConfig(
        text["vocab_size"], text["max_position_embeddings"], stack, False, stem_norm=True, positions=positions(text),
        segments=text["type_vocab_size"],
    )  # fmt: skip
    return changed(made, {"post_norm": True, "gated": True}, bias=False)


def rows(config: TextConfig) -> list[NameRow]:
    block = [*linears(BLOCK), *weight_and_bias("attn.Wqkv", qkv("attention"), THIRDS)]
    made = [
        NameRow(EMBEDDING, "embed.weight"), NameRow("embeddings.token_type_embeddings.weight", "segments.weight"),
        *weight_and_bias("emb_ln", "norm"), *under("encoder.layers.{}.", "stack.blocks.{}.", block),
    ]  # fmt: skip
    own = bert.names_of(config)
    return [row for row in made if all(target in own for target in row.targets)]


def _renamed(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    made = {NAMES.get(name, name): value for name, value in config.items()}
    return {name: value for name, value in made.items() if value is not None}


FAMILY = Family(
    "nomic-bert", TextTransformer, (EMBEDDING, "encoder.layers.0.attn.Wqkv.weight"), config_from, rows,
    bert.encoder_tokenizer, card=bert.encoder_card, needs="config.json", complete=_renamed, defaults=DEFAULTS,
    types=("nomic_bert",),
)  # fmt: skip
