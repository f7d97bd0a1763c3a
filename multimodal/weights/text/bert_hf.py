"""BERT in transformers' names (Devlin et al. 2019): BertForPreTraining, BertForMaskedLM, BertModel,
BertForSequenceClassification, BertForNextSentencePrediction.

Traps: `cls.predictions.decoder.bias` repeats `cls.predictions.bias`. The next-sentence head is a classifier on the
pooler, like a fine-tuned one under another name. A bare BertModel has no `bert.` prefix. Google's files on the hub call
the norms' parameters `gamma` and `beta`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, weight_and_bias
from multimodal.weights.text import bert

MASKED, NEXT = "cls.predictions", "cls.seq_relationship"
HEAD = bert.Head(f"{MASKED}.transform.dense", f"{MASKED}.transform.LayerNorm", f"{MASKED}.decoder", f"{MASKED}.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError for token classifiers and cross-attention."""
    made = bert.encoder_config(config, tensors, prefix, HEAD, {})
    return bert.with_classes(made, tensors, {f"{prefix}pooler.dense": "tanh"}, NEXT, "classifier")


def rows(config: TextConfig, prefix: str, classes: str | None = None) -> list[NameRow]:
    """`classes`: name of the classifier; None: the next-sentence head beside logits, else `classifier`."""
    classes = classes or ("classifier" if config.tied is None else NEXT)
    return [
        *bert.tower_rows(prefix, segments=config.segments),
        *(weight_and_bias(f"{prefix}pooler.dense", "pool.linear") if config.pool else []),
        *HEAD.rows(prefix + bert.WORD, config),
        *(weight_and_bias(classes, "classes") if config.classes else []),
    ]


def old_rows(config: TextConfig) -> list[NameRow]:
    """Rows with the norms in TensorFlow's names, as in the first published files."""

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return [replace(row, foreign=old(row.foreign)) for row in rows(config, "bert.")]


def _form(tensors: Tensors) -> str:
    """Name of the family of a BERT with heads."""
    if "bert.embeddings.LayerNorm.gamma" in tensors:
        return "bert-old"
    alone = f"{NEXT}.weight" in tensors and f"{HEAD.dense}.weight" not in tensors
    return "bert-next-sentence" if alone else "bert"


def _with_heads(name: str, table: Callable[[TextConfig], list[NameRow]]) -> Family:
    known = _FAMILIES[0].recognises
    return replace(
        _FAMILIES[0], name=name, rows=table,
        recognises=lambda tensors, config: known(tensors, config) and _form(tensors) == name,
    )  # fmt: skip


_FAMILIES = bert.families(("bert",), config_from, rows, partial(bert.encoder_tokenizer, defaults={}))
FAMILY, MODEL = _with_heads("bert", partial(rows, prefix="bert.")), _FAMILIES[1]
NEXT_SENTENCE = _with_heads("bert-next-sentence", partial(rows, prefix="bert.", classes=NEXT))
OLD = _with_heads("bert-old", old_rows)
