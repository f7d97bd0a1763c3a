"""Canary in Hugging Face's names.

Traps: sinusoids have the factor 1/sqrt(width); the decoder's norms come before its branches and after its embedding;
logits have a bias."""

from pathlib import Path
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.speech.canary import Canary, CanaryConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.speech.parakeet import check_features, encoder_config, encoder_rows
from multimodal.weights.table import NameRow, Tensors, linears, repeat, under, weight_and_bias

# values of decoder_config that give other results
ONLY = {"attention_bias": True, "hidden_act": "relu"}
ATTENTIONS = {"self_attn": "attention", "encoder_attn": "cross"}
EMBEDDING, HEAD = "model.decoder.embed_tokens.weight", "proj_out.weight"


def canary_config(config: dict[str, Any], tensors: Tensors, interleaved: bool = False) -> CanaryConfig:
    """`interleaved`: sines and cosines of positions alternate. Raises CheckpointError."""
    own, encoder = config["decoder_config"], encoder_config(config["encoder_config"])
    for key, only in ONLY.items():
        if own.get(key, only) != only:
            raise CheckpointError(f"canary config: decoder_config: {key} must be {only!r} (got {own[key]!r})")
    width, heads = own["hidden_size"], own["num_attention_heads"]
    if (own.get("num_key_value_heads") or heads) != heads or own.get("head_dim", width // heads) != width // heads:
        raise CheckpointError(f"canary config: decoder_config: expected {heads} heads of {width // heads} numbers")
    project = config.get("project", False)
    if encoder.width != width and not project:
        raise CheckpointError(f"canary config: encoder's width {encoder.width} is not {width}, the decoder's")
    stack = transformer(
        width, own["num_hidden_layers"], heads, own["intermediate_size"], activation="relu", source_width=width
    )
    positions = PositionConfig("sinusoidal", interleaved=interleaved, gain=width**-0.5)
    text = TextConfig(
        config["vocab_size"], own["max_position_embeddings"], stack, causal=True, tied=True, head_bias=True,
        stem_norm=True, positions=positions,
    )  # fmt: skip
    return CanaryConfig(encoder, text, config["eos_token_id"], project)


def _block() -> list[NameRow]:
    parts = {f"{theirs}.{way}_proj": f"{own}.{ours}" for theirs, own in ATTENTIONS.items()
             for way, ours in {"q": "query", "k": "key", "v": "value", "o": "out"}.items()}  # fmt: skip
    norms = {"input_layernorm": "attention_branch.norm", "post_attention_layernorm": "cross_branch.norm",
             "final_layernorm": "feed_branch.norm"}  # fmt: skip
    return linears(parts | norms | {"mlp.fc1": "feed.up", "mlp.fc2": "feed.down"})


def canary_rows(config: CanaryConfig) -> list[NameRow]:
    return [
        *under("model.", "", encoder_rows(config.encoder)),
        *under("model.decoder.layers.{}.", "decoder.stack.blocks.{}.", _block()),
        *weight_and_bias("model.decoder.embedding_layernorm", "decoder.norm"),
        *weight_and_bias("model.decoder.norm", "decoder.stack.norm"),
        NameRow(EMBEDDING, "decoder.embed.weight"), repeat(HEAD, EMBEDDING),
        NameRow("proj_out.bias", "decoder.tied_bias"),
    ]  # fmt: skip


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return hub_tokenizer(folder, config)


CANARY = Family(
    "canary", Canary, ("model.encoder.subsampling.linear.weight", EMBEDDING), canary_config, canary_rows, _tokenizer,
    card=check_features, needs="config.json", defaults={"eos_token_id": 3, "vocab_size": 16384}, types=("", "canary"),
)  # fmt: skip
