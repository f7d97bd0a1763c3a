"""Marian translators (Junczys-Dowmunt et al. 2018), such as OPUS-MT's, in the names of transformers' MarianMTModel: the
original Transformer (Vaswani et al. 2017), with norms after each sum and none at the end.

Traps: all sines precede all cosines, and some files store the static table. Source and target may have separate
embeddings (`share_encoder_decoder_embeddings`). Outputs begin with the pad id."""

from pathlib import Path
from typing import Any

import torch

from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig, sinusoidal_positions
from multimodal.system.files import optional_json
from multimodal.tokens.text.tokenizer import RECORD
from multimodal.tokens.text.translation import marian_tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors
from multimodal.weights.text import bart

# MarianConfig's defaults
DEFAULTS = bart.DEFAULTS | {
    "vocab_size": 58101, "decoder_start_token_id": 58100, "pad_token_id": 58100, "eos_token_id": 0,
    "share_encoder_decoder_embeddings": True, "decoder_vocab_size": None,
}  # fmt: skip
POSITIONS = PositionConfig("sinusoidal")
TABLES = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]


def check_sinusoids(tensors: Tensors) -> None:
    """Raise CheckpointError for a table of positions that are not the sinusoids."""
    for name in TABLES:
        if name in tensors:
            expected = sinusoidal_positions(POSITIONS, torch.arange(len(tensors[name])), tensors[name].shape[1])
            if not torch.allclose(tensors[name].float(), expected, atol=2e-3):  # half precision, far positions
                raise CheckpointError(f"tensor {name!r} does not hold sinusoidal positions")


def config_from(config: dict[str, Any], tensors: Tensors) -> EncoderDecoderConfig:
    """Raises CheckpointError for positions other than the sinusoids."""
    check_sinusoids(tensors)
    return bart.text_to_text(config, tensors, POSITIONS, post_norm=True, stem_norm=False)


def rows(config: EncoderDecoderConfig) -> list[NameRow]:
    return [
        *bart.rows(config),
        *(NameRow(name, reason="sinusoids, which are computed", optional=True) for name in TABLES),
    ]


def card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Source and target language."""
    record = optional_json(folder / RECORD) if folder else {}
    sides = record.get("source_lang"), record.get("target_lang")
    return {"translation": {"from": sides[0], "to": sides[1]}} if all(isinstance(s, str) for s in sides) else {}


FAMILY = Family(
    "marian", EncoderDecoder,
    ("model.decoder.layers.0.encoder_attn.q_proj.weight", "model.encoder.layers.0.self_attn_layer_norm.weight"),
    config_from, rows, marian_tokenizer, card=card, needs="config.json", defaults=DEFAULTS, types=("", "marian"),
    lacks=("model.encoder.layernorm_embedding.weight", "model.encoder.layer_norm.weight"),
)  # fmt: skip
