"""ELECTRA in transformers' names (Clark et al. 2020): generator (ElectraForMaskedLM), discriminator
(ElectraForPreTraining), classifier and ElectraModel.

Traps: if the embedding width differs from the blocks', `embeddings_project` maps to it, and the head maps back.
Generator and classifier have GELU whatever the blocks have."""

from dataclasses import replace
from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.table import NameRow, Tensors, linears
from multimodal.weights.text import bert

# ElectraConfig's defaults that differ from BERT's
DEFAULTS = {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
LOGITS, DETECT = "generator_lm_head", "discriminator_predictions"
HEAD = bert.Head("generator_predictions.dense", "generator_predictions.LayerNorm", LOGITS, f"{LOGITS}.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as BERT's does."""
    made = bert.encoder_config(config, tensors, prefix, HEAD, gelu_head=True)
    inner = config["embedding_size"]
    made = replace(made, embed_width=None if inner == made.width else inner, detect=f"{DETECT}.dense.weight" in tensors)
    return bert.with_classes(made, tensors, {"classifier.dense": "gelu"}, "classifier.out_proj")


def rows(config: TextConfig, prefix: str) -> list[NameRow]:
    detector = {f"{DETECT}.dense": "detect.linear", f"{DETECT}.dense_prediction": "detect.out"}
    classifier = {"classifier.dense": "pool.linear", "classifier.out_proj": "classes"}
    names = (detector if config.detect else {}) | (classifier if config.classes else {})
    names |= {f"{prefix}embeddings_project": "widen"} if config.embed_width else {}
    return [*bert.tower_rows(prefix, segments=config.segments), *HEAD.rows(prefix + bert.WORD, config), *linears(names)]


FAMILY, MODEL = bert.families(("electra",), config_from, rows, DEFAULTS)
