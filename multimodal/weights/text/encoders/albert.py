"""ALBERT in transformers' names (Lan et al. 2020): AlbertForPreTraining (masked tokens and sentence order),
AlbertForMaskedLM, AlbertForSequenceClassification, AlbertModel, and its classifiers of tokens, answers and choices.

Traps: a group of blocks shares its weights among its layers; only one group, or as many as layers, is supported. The
map from the embedding width exists even if both widths are equal. The bias of the logits has two names."""

from dataclasses import replace
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import TextConfig
from multimodal.weights.table import NameRow, Tensors, linears, under, weight_and_bias
from multimodal.weights.text import bert

# AlbertConfig's defaults that differ from BERT's
DEFAULTS = {
    "vocab_size": 30000, "embedding_size": 128, "hidden_size": 4096, "num_hidden_groups": 1, "inner_group_num": 1,
    "num_attention_heads": 64, "intermediate_size": 16384, "hidden_act": "gelu_new",
}  # fmt: skip
ORDER = "sop_classifier.classifier"
HEAD = bert.Head("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
BLOCK = {
    "attention.query": "attention.query", "attention.key": "attention.key", "attention.value": "attention.value",
    "attention.dense": "attention.out", "attention.LayerNorm": "attention_branch.norm", "ffn": "feed.up",
    "ffn_output": "feed.down", "full_layer_layer_norm": "feed_branch.norm",
}  # fmt: skip


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as BERT's does, and for several groups that share layers."""
    made = bert.encoder_config(config | bert.ENCODER, tensors, prefix, HEAD)
    groups, inner, layers = config["num_hidden_groups"], config["inner_group_num"], made.stack.layers
    if groups != 1 and (groups, inner) != (layers, 1):
        raise CheckpointError(f"config.json: {groups} groups of {inner} blocks in {layers} layers are not supported")
    shared = inner if groups == 1 else None
    stack = replace(made.stack, layers=layers * inner, shared=shared)
    made = replace(made, stack=stack, embed_width=config["embedding_size"])
    return bert.with_classes(made, tensors, config, {f"{prefix}pooler": "tanh"}, ORDER, "classifier")


def rows(config: TextConfig, prefix: str) -> list[NameRow]:
    blocks = "{}.albert_layers.0" if config.stack.shared is None else "0.albert_layers.{}"
    classes = "classifier" if config.tied is None else ORDER
    return [
        *bert.embedding_rows(prefix, "", config.segments),
        *weight_and_bias(f"{prefix}encoder.embedding_hidden_mapping_in", "widen"),
        *under(f"{prefix}encoder.albert_layer_groups.{blocks}.", "stack.blocks.{}.", linears(BLOCK)),
        *HEAD.rows(prefix + bert.WORD, config),
        *(weight_and_bias(f"{prefix}pooler", "pool.linear") if config.pool else []),
        *(weight_and_bias(classes, "classes") if config.classes else []),
        *bert.token_heads(config),
    ]


FAMILY, MODEL = bert.families(("albert",), config_from, rows, DEFAULTS)
