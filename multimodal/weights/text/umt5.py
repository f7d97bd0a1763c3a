"""UMT5 in transformers' names (Chung et al. 2023): mT5 with a distance table in every block."""

from dataclasses import replace
from typing import Any

from multimodal.models.encoder_decoder import EncoderDecoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.weights.table import NameRow, Tensors
from multimodal.weights.text import t5


def _layered(tower: TextConfig) -> TextConfig:
    return replace(tower, positions=replace(tower.positions, layered=True))


def config_from(c: dict[str, Any], tensors: Tensors) -> EncoderDecoderConfig:
    """Raises CheckpointError as T5's does."""
    made = t5.config_from(c, tensors)
    return replace(made, encoder=_layered(made.encoder), decoder=_layered(made.decoder))


def rows(config: EncoderDecoderConfig | TextConfig) -> list[NameRow]:
    made = t5.encoder_rows(config) if isinstance(config, TextConfig) else t5.rows(config)
    return [_per_block(row) for row in made]


def _per_block(row: NameRow) -> NameRow:
    if not row.targets or not row.targets[0].endswith("bias.table.weight"):
        return row
    ours = row.targets[0].replace("bias.table.weight", "layer_biases.{}.table.weight")
    return replace(row, foreign=row.foreign.replace("block.0.", "block.{}."), ours=ours)


def complete(c: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """States are scaled before a tied head, whatever the file says of it."""
    return c | {"scale_decoder_outputs": c.get("tie_word_embeddings", True)}


FAMILY = replace(
    t5.FAMILY, name="umt5", config_from=config_from, rows=rows, types=("umt5",), defaults=t5.T5 | t5.MT5,
    complete=complete,
)  # fmt: skip
ENCODER = replace(
    t5.ENCODER, name="umt5-encoder", model=TextTransformer, types=("umt5",), rows=rows,
    config_from=lambda c, tensors: _layered(t5.encoder_config(c, tensors)), defaults=FAMILY.defaults,
)  # fmt: skip
