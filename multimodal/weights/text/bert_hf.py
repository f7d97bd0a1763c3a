"""BERT in the names of transformers (Devlin et al. 2019): BertForPreTraining, BertForMaskedLM, BertModel,
BertForSequenceClassification, BertForNextSentencePrediction.

Traps: the bias of the logits has two names, `cls.predictions.decoder.bias` repeats `cls.predictions.bias`. The map of
the next sentence is a classifier on the pooler, as that of a fine-tuned model under its own name. A BertModel saved
alone has no `bert.` before its names. Google's own files on the hub have `gamma` and `beta` for the norms."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.family import Family
from multimodal.weights.table import Row, Tensors, weight_and_bias
from multimodal.weights.text import bert

MASKED, NEXT = "cls.predictions", "cls.seq_relationship"
HEAD = bert.Head(f"{MASKED}.transform.dense", f"{MASKED}.transform.LayerNorm", f"{MASKED}.decoder", f"{MASKED}.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError for a classifier of tokens, and for a decoder over another model."""
    made = bert.encoder_config("BERT", config, tensors, prefix, HEAD, {})
    return bert.with_classes(made, tensors, {f"{prefix}pooler.dense": "tanh"}, NEXT, "classifier")


def rows(config: TextConfig, prefix: str, classes: str | None = None) -> list[Row]:
    """`classes`: the classifier's name; None: the next sentence's where there are logits, else `classifier`."""
    classes = classes or ("classifier" if config.tied is None else NEXT)
    return [
        *bert.tower_rows(prefix, segments=config.segments),
        *(weight_and_bias(f"{prefix}pooler.dense", "pool.linear") if config.pool else []),
        *HEAD.rows(prefix + bert.WORD, config),
        *(weight_and_bias(classes, "classes") if config.classes else []),
    ]


def old_rows(config: TextConfig) -> list[Row]:
    """With the norms in TensorFlow's names, as the first files that were published have them."""

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return [replace(row, foreign=old(row.foreign)) for row in rows(config, "bert.")]


def _form(tensors: Tensors) -> str:
    """The family of a file of a BERT with heads."""
    if "bert.embeddings.LayerNorm.gamma" in tensors:
        return "bert-old"
    alone = f"{NEXT}.weight" in tensors and f"{HEAD.dense}.weight" not in tensors
    return "bert-next-sentence" if alone else "bert"


def _with_heads(name: str, table: Callable[[TextConfig], list[Row]]) -> Family:
    known = _FAMILIES[0].recognises
    return replace(
        _FAMILIES[0], name=name, rows=table,
        recognises=lambda tensors, config: known(tensors, config) and _form(tensors) == name,
    )  # fmt: skip


_FAMILIES = bert.families(("bert",), config_from, rows, partial(bert.encoder_tokenizer, defaults={}))
FAMILY, MODEL = _with_heads("bert", partial(rows, prefix="bert.")), _FAMILIES[1]
NEXT_SENTENCE = _with_heads("bert-next-sentence", partial(rows, prefix="bert.", classes=NEXT))
OLD = _with_heads("bert-old", old_rows)
