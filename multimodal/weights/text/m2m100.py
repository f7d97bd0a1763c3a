"""M2M100 (Fan et al. 2021) and NLLB-200's dense models (NLLB Team 2022) in the names of transformers'
M2M100ForConditionalGeneration.

Traps: embeddings are multiplied by √D. Sinusoids are not stored; they begin at position `pad_token_id` + 1 and end at
the base itself, as in tensor2tensor. Norms precede each branch and end the stack. A source is [its language] text
[eos]; an output begins with eos and the target language."""

from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors
from multimodal.weights.text import bart

# M2M100Config's defaults
DEFAULTS = bart.DEFAULTS | {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}
NORM, OTHERS = "model.encoder.layer_norm.weight", ("layernorm_embedding.weight", "embed_positions.weight")


def config_from(config: dict[str, Any], tensors: Tensors) -> EncoderDecoderConfig:
    """Raises CheckpointError as BART's does, and for an invalid `pad_token_id`."""
    c = DEFAULTS | config
    if type(pad := c["pad_token_id"]) is not int or pad < 0:
        raise CheckpointError(f"config.json: pad_token_id {pad!r} must be an id (positions begin after it)")
    positions = PositionConfig("sinusoidal", first=pad + 1, inclusive=True)
    return bart.text_to_text(c, tensors, positions, post_norm=False, stem_norm=False)


def rows(config: EncoderDecoderConfig) -> list[NameRow]:
    computed = [
        NameRow(f"model.{side}.embed_positions.weights", reason="sinusoids, which are computed", optional=True)
        for side in ("encoder", "decoder")
    ]
    return [*bart.rows(config), *computed]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    from multimodal.tokens.text.translation import m2m100_tokenizer

    return m2m100_tokenizer(folder, DEFAULTS | config)


def _recognises(tensors: Tensors, config: dict[str, Any]) -> bool:
    others = any(f"model.encoder.{name}" in tensors for name in OTHERS)
    shared = {NORM, "model.shared.weight", "model.decoder.layers.0.encoder_attn.q_proj.weight"} <= set(tensors)
    return shared and not others and config.get("model_type", "m2m_100") == "m2m_100"


FAMILY = Family(
    "m2m100", EncoderDecoder, recognises=_recognises, config_from=config_from, rows=rows, tokenizer=tokenizer,
    needs="config.json",
)  # fmt: skip
