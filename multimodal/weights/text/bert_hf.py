"""BERT in transformers' names (Devlin et al. 2019): BertForPreTraining, BertForMaskedLM, BertModel,
BertForSequenceClassification, BertForNextSentencePrediction, and its classifiers of tokens, answers and choices.

Traps: `cls.predictions.decoder.bias` repeats `cls.predictions.bias`. The next-sentence head is a classifier on the
pooler, like a fine-tuned one under another name. A bare BertModel has no `bert.` prefix. Google's files on the hub call
the norms' parameters `gamma` and `beta`."""

from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.models.text_config import TextConfig
from multimodal.weights.table import NameRow, Tensors, weight_and_bias
from multimodal.weights.text import bert

MASKED, NEXT = "cls.predictions", "cls.seq_relationship"
HEAD = bert.Head(f"{MASKED}.transform.dense", f"{MASKED}.transform.LayerNorm", f"{MASKED}.decoder", f"{MASKED}.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError for cross-attention, and as `bert.with_classes` does."""
    made = bert.encoder_config(config, tensors, prefix, HEAD)
    return bert.with_classes(made, tensors, config, {f"{prefix}pooler.dense": "tanh"}, NEXT, "classifier")


def rows(config: TextConfig, prefix: str, classes: str | None = None) -> list[NameRow]:
    """`classes`: name of the classifier; None: the next-sentence head beside logits, else `classifier`."""
    classes = classes or ("classifier" if config.tied is None else NEXT)
    return [
        *bert.tower_rows(prefix, segments=config.segments),
        *(weight_and_bias(f"{prefix}pooler.dense", "pool.linear") if config.pool else []),
        *HEAD.rows(prefix + bert.WORD, config),
        *(weight_and_bias(classes, "classes") if config.classes else []),
        *bert.token_heads(config),
    ]


def old_rows(config: TextConfig, prefix: str) -> list[NameRow]:
    """Rows with the norms in TensorFlow's names, as in the first published files."""

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return [replace(row, foreign=old(row.foreign)) for row in rows(config, prefix)]


_HEADS, _MODEL = bert.families(("bert",), config_from, rows, {})
_LOGITS, _NEXT, _GAMMA = f"{HEAD.dense}.weight", f"{NEXT}.weight", "embeddings.LayerNorm.gamma"
FAMILY = replace(_HEADS, lacks=(f"bert.{_GAMMA}",), only=lambda tensors: _NEXT not in tensors or _LOGITS in tensors)
NEXT_SENTENCE = replace(
    _HEADS, name="bert-next-sentence", has=(*_HEADS.has, _NEXT), lacks=(f"bert.{_GAMMA}", _LOGITS),
    rows=partial(rows, prefix="bert.", classes=NEXT),
)  # fmt: skip
MODEL = replace(_MODEL, lacks=(_GAMMA,))
OLD, OLD_MODEL = (
    replace(family, name=name, has=(*family.has, prefix + _GAMMA), rows=partial(old_rows, prefix=prefix))
    for family, name, prefix in ((_HEADS, "bert-old", "bert."), (_MODEL, "bert-old-model", ""))
)
