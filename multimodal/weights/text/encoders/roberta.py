"""RoBERTa, XLM-RoBERTa and CamemBERT in transformers' names (Liu et al. 2019).

Traps: the first position is row `pad_token_id` + 1 of its table; earlier rows are kept but never read. The head has
GELU whatever the blocks have. The classifier has its own pooler; some files also hold the encoder's, unused. Choices
(RobertaForMultipleChoice) are scored from the encoder's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, weight_and_bias
from multimodal.weights.text import bert

# RobertaConfig's own default
DEFAULTS = {"pad_token_id": 1}
HEAD = bert.Head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as BERT's does, and for an invalid `pad_token_id`."""
    made = bert.encoder_config(config, tensors, prefix, HEAD, gelu_head=True)
    if type(pad := config["pad_token_id"]) is not int or not -1 <= pad < made.context - 1:
        raise CheckpointError(f"config.json: pad_token_id {pad!r} must be a row before the last position")
    made = replace(made, positions=PositionConfig(first=pad + 1), context=made.context - pad - 1)
    pools = {"classifier.dense": "tanh", f"{prefix}pooler.dense": "tanh"}
    return bert.with_classes(made, tensors, config, pools, "classifier.out_proj", bert.TAGS)


def rows(config: TextConfig, prefix: str, choice: bool = False) -> list[NameRow]:
    """`choice`: the classifier scores the encoder's pooled state."""
    own = config.classes and not choice
    pooler, unused = f"{prefix}pooler.dense", "the classifier has its own pooler"
    spare = [NameRow(f"{pooler}.{part}", reason=unused, optional=True) for part in ("weight", "bias")]
    return [
        *bert.tower_rows(prefix, segments=config.segments),
        *HEAD.rows(prefix + bert.WORD, config),
        *(weight_and_bias("classifier.dense" if own else pooler, "pool.linear") if config.pool else []),
        *([*weight_and_bias("classifier.out_proj", "classes"), *spare] if own else []),
        *(weight_and_bias("classifier", "classes") if config.classes and choice else []),
        *bert.token_heads(config),
    ]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return bert.encoder_tokenizer(folder, config, config["pad_token_id"] + 1)


def with_choice(heads: Family, rows: Callable[..., list[NameRow]]) -> tuple[Family, Family]:
    """The family of all heads but that of choices, and of this one, which scores the encoder's pooled state."""
    kind = heads.types[1]
    pooled = (f"{bert.TAGS}.weight", f"{kind}.pooler.dense.weight")
    scored = lambda tensors: all(name in tensors for name in pooled) and len(tensors[pooled[0]]) == 1
    choice = replace(heads, name=f"{kind}-choice", rows=partial(rows, prefix=f"{kind}.", choice=True), only=scored)
    return replace(heads, only=lambda tensors: not scored(tensors)), choice


TYPES = ("roberta", "xlm-roberta", "camembert")
_HEADS, MODEL = bert.families(TYPES, config_from, rows, DEFAULTS, tokenizer=tokenizer)
FAMILY, CHOICE = with_choice(_HEADS, rows)
