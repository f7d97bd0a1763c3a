"""Pegasus (Zhang et al. 2020) and Blenderbot (Roller et al. 2021) in transformers' names: BART with norms before each
branch and at the end, and none on the embeddings.

Traps: Pegasus has sinusoids, which its files may hold; Blenderbot has learned positions from row 0 on."""

from dataclasses import replace
from functools import partial
from typing import Any

from multimodal.models.encoder_decoder import EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig
from multimodal.weights.table import Tensors
from multimodal.weights.text import bart, marian

_TOWERS = ("model.encoder.layer_norm.weight", "model.shared.weight",
           "model.decoder.layers.0.encoder_attn.q_proj.weight")  # fmt: skip


def config_from(config: dict[str, Any], tensors: Tensors, positions: PositionConfig) -> EncoderDecoderConfig:
    """Raises CheckpointError as BART's does, and for positions other than the sinusoids of Pegasus."""
    if positions.kind == "sinusoidal":
        marian.check_sinusoids(tensors)
    return bart.text_to_text(config, tensors, positions, post_norm=False, stem_norm=False)


PEGASUS = replace(
    marian.FAMILY, name="pegasus", has=_TOWERS, lacks=(), types=("pegasus",), tokenizer=bart.tokenizer,
    config_from=partial(config_from, positions=marian.POSITIONS), card=lambda folder, config: {},
    defaults=bart.DEFAULTS | {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None},
)  # fmt: skip
BLENDERBOT = replace(
    PEGASUS, name="blenderbot", has=(*_TOWERS, "model.encoder.embed_positions.weight"), types=("blenderbot",),
    config_from=partial(config_from, positions=PositionConfig()), rows=bart.rows,
    defaults=bart.DEFAULTS | {"decoder_start_token_id": 1, "bos_token_id": 1, "pad_token_id": 0,
                              "max_position_embeddings": 128, "encoder_attention_heads": 32,
                              "decoder_attention_heads": 32},
)  # fmt: skip
