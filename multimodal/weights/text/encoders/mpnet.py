"""MPNet in transformers' names (Song et al. 2020): MPNetForMaskedLM, MPNetForSequenceClassification,
MPNetForMultipleChoice, MPNetModel.

Traps: beside learned positions, which begin at row 2 of their table, scores have T5's bias of distances, one table for
all layers. The head has GELU whatever the blocks have."""

from dataclasses import replace
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.weights.table import NameRow, Tensors, linears, under
from multimodal.weights.text import bert
from multimodal.weights.text.encoders import roberta

BUCKETS = 32
DEFAULTS = {"vocab_size": 30527, "relative_attention_num_buckets": BUCKETS, "pad_token_id": 1}
BIAS = "encoder.relative_attention_bias.weight"
BLOCK = {f"attention.attn.{part}": f"attention.{ours}" for part, ours in
         (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))} | bert.FEED | {
    "attention.LayerNorm": "attention_branch.norm"}  # fmt: skip


def config_from(config: dict[str, Any], tensors: Tensors, prefix: str) -> TextConfig:
    """Raises CheckpointError as RoBERTa's does, and for another number of buckets than the original's."""
    if (buckets := config["relative_attention_num_buckets"]) != BUCKETS:
        raise CheckpointError(f"config.json: relative_attention_num_buckets {buckets!r} is not supported")
    own = {"pad_token_id": 1, "type_vocab_size": 0, **bert.ENCODER}  # whatever pads, positions begin at row 2
    made = roberta.config_from(config | own, tensors, prefix)
    return replace(made, distances=PositionConfig("bucket", buckets=BUCKETS))


def rows(config: TextConfig, prefix: str, choice: bool = False) -> list[NameRow]:
    tower = [
        *bert.embedding_rows("", "", config.segments), NameRow(BIAS, "bias.table.weight"),
        *under("encoder.layer.{}.", "stack.blocks.{}.", linears(BLOCK)),
    ]  # fmt: skip
    parts = (f"{prefix}emb", f"{prefix}enc")
    shared = [row for row in roberta.rows(config, prefix, choice) if not row.foreign.startswith(parts)]
    return [*under(prefix, "", tower), *shared]


_HEADS, MODEL = bert.families(("mpnet",), config_from, rows, DEFAULTS, tokenizer=roberta.tokenizer)
FAMILY, CHOICE = roberta.with_choice(_HEADS, rows)
