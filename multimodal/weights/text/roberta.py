"""RoBERTa in the names of transformers (Liu et al. 2019), and what has its form: XLM-RoBERTa, CamemBERT.

Traps: the first position is row `pad_token_id` + 1 of its table; the rows before it are kept, and never read. Logits
go through gelu whatever the blocks have. A classifier brings its own pooler; some files hold the encoder's too, which
it does not use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.table import Row, Tensors, weight_and_bias
from multimodal.weights.text import bert

# RobertaConfig's own default
DEFAULTS = {"pad_token_id": 1}
HEAD = bert.Head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as BERT's does, and for positions that have no first row."""
    made = bert.encoder_config("RoBERTa", config, tensors, prefix, HEAD, DEFAULTS, gelu_head=True)
    if type(pad := (DEFAULTS | config)["pad_token_id"]) is not int or not -1 <= pad < made.context - 1:
        raise CheckpointError(f"config.json: pad_token_id {pad!r}, after which positions begin, is no row of theirs")
    made = replace(made, positions=PositionConfig(first=pad + 1), context=made.context - pad - 1)
    pools = {"classifier.dense": "tanh", f"{prefix}pooler.dense": "tanh"}
    return bert.with_classes(made, tensors, pools, "classifier.out_proj")


def rows(config: TextConfig, prefix: str) -> list[Row]:
    pooler, unused = f"{prefix}pooler.dense", "the classifier has its own pooler"
    spare = [Row(f"{pooler}.{part}", reason=unused, optional=True) for part in ("weight", "bias")]
    return [
        *bert.tower_rows(prefix, segments=config.segments),
        *HEAD.rows(prefix + bert.WORD, config),
        *(weight_and_bias("classifier.dense" if config.classes else pooler, "pool.linear") if config.pool else []),
        *([*weight_and_bias("classifier.out_proj", "classes"), *spare] if config.classes else []),
    ]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return bert.encoder_tokenizer(folder, config, DEFAULTS, (DEFAULTS | config)["pad_token_id"] + 1)


FAMILY, MODEL = bert.families(("roberta", "xlm-roberta", "camembert"), config_from, rows, tokenizer)
