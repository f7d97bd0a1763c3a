"""M2M100 (Fan et al. 2021) and NLLB-200's dense models (NLLB Team 2022) in the names of transformers'
M2M100ForConditionalGeneration.

Traps: embeddings are multiplied by √D. Sinusoids are not stored; they begin at position `pad_token_id` + 1 and end at
the base itself, as in tensor2tensor. Norms precede each branch and end the stack. A source is [its language] text
[eos]; an output begins with eos and the target language."""

from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig
from multimodal.tokens.text.translation import m2m100_tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors
from multimodal.weights.text import bart

# M2M100Config's defaults
DEFAULTS = bart.DEFAULTS | {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True}


def config_from(config: dict[str, Any], tensors: Tensors) -> EncoderDecoderConfig:
    """Raises CheckpointError as BART's does, and for an invalid `pad_token_id`."""
    if type(pad := config["pad_token_id"]) is not int or pad < 0:
        raise CheckpointError(f"config.json: pad_token_id {pad!r} must be an id (positions begin after it)")
    positions = PositionConfig("sinusoidal", first=pad + 1, inclusive=True)
    return bart.text_to_text(config, tensors, positions, post_norm=False, stem_norm=False)


def rows(config: EncoderDecoderConfig) -> list[NameRow]:
    computed = [
        NameRow(f"model.{side}.embed_positions.weights", reason="sinusoids, which are computed", optional=True)
        for side in ("encoder", "decoder")
    ]
    return [*bart.rows(config), *computed]


FAMILY = Family(
    "m2m100", EncoderDecoder,
    ("model.encoder.layer_norm.weight", "model.shared.weight", "model.decoder.layers.0.encoder_attn.q_proj.weight"),
    config_from, rows, m2m100_tokenizer, needs="config.json", defaults=DEFAULTS, types=("", "m2m_100"),
    lacks=("model.encoder.layernorm_embedding.weight", "model.encoder.embed_positions.weight"),
)  # fmt: skip
