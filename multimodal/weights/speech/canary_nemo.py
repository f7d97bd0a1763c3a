"""Canary of NeMo: `.nemo` archives of EncDecMultiTaskModel.

Traps: sines and cosines of positions alternate, and are a tensor of the file; the head repeats the embedding; several
SentencePiece models stand one behind another, in the order of the configuration."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.errors import CheckpointError
from multimodal.models.speech.canary import CanaryConfig
from multimodal.models.text_config import PositionConfig, sinusoidal_positions
from multimodal.tokens.text.hub.recognizers import AggregateTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.speech.canary import CANARY, canary_config, canary_rows
from multimodal.weights.speech.parakeet_nemo import complete_encoder, renamed, warn_unread_tokenizer
from multimodal.weights.table import NameRow, Tensors, weight_and_bias

DECODER = "transf_decoder._decoder"
NAMES = {
    r"^model\.encoder": "encoder", r"^model\.decoder\.embed_tokens": "transf_decoder._embedding.token_embedding",
    r"^model\.decoder\.embedding_layernorm": "transf_decoder._embedding.layer_norm",
    r"^model\.decoder\.norm": f"{DECODER}.final_layer_norm", r"^model\.decoder": DECODER,
    r"^proj_out": "log_softmax.mlp.layer0", r"^(transf_.+)self_attn\.(.)_proj": r"\1first_sub_layer.\2_net",
    r"encoder_attn\.(.)_proj": r"second_sub_layer.\1_net", "mlp.fc1": "third_sub_layer.dense_in",
    "mlp.fc2": "third_sub_layer.dense_out", "input_layernorm": "layer_norm_1",
    "post_attention_layernorm": "layer_norm_2", "final_layernorm": "layer_norm_3", r"\.q_net": ".query_net",
    r"\.k_net": ".key_net", r"\.v_net": ".value_net", r"\.o_net": ".out_projection",
}  # fmt: skip
EMBEDDING, POSITIONS = (f"transf_decoder._embedding.{name}" for name in (
    "token_embedding.weight", "position_embedding.pos_enc"))  # fmt: skip
# values of transf_decoder.config_dict that give other results
ONLY = {"hidden_act": "relu", "pre_ln": True, "learn_positional_encodings": False, "pre_ln_final_layer_norm": True}


def _decoder_name(name: str) -> str:
    """NeMo's name of a tensor of the decoder."""
    for theirs, nemo in NAMES.items():
        name = re.sub(theirs, nemo, name)
    return name


def _table(config: CanaryConfig) -> Tensor:
    return sinusoidal_positions(
        config.decoder.positions, torch.arange(config.decoder.context), config.decoder.width
    )  # fmt: skip


def _complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The configuration as transformers writes it. Raises CheckpointError."""
    own = (config.get("transf_decoder") or {}).get("config_dict") or {}
    for key, only in ONLY.items():
        if own.get(key, only) != only:
            raise CheckpointError(f"nemo config: transf_decoder: {key} must be {only!r} (got {own[key]!r:.40})")
    second = config.get("transf_encoder") or {}
    if (second.get("config_dict") or second).get("num_layers"):
        raise CheckpointError("nemo config: transf_encoder: a second encoder is not supported")
    table, size = tensors[POSITIONS], len(tensors[EMBEDDING])
    positions = PositionConfig("sinusoidal", interleaved=True, gain=table.shape[1] ** -0.5)
    expected = sinusoidal_positions(positions, torch.arange(len(table)), table.shape[1])
    if not torch.allclose(table.float(), expected, atol=1e-3):
        raise CheckpointError(f"tensor {POSITIONS!r} does not hold the sinusoids of its positions")
    decoder = {
        "hidden_size": table.shape[1], "num_attention_heads": own["num_attention_heads"],
        "num_hidden_layers": own["num_layers"], "intermediate_size": own["inner_size"],
        "max_position_embeddings": len(table),
    }  # fmt: skip
    tokens = _tokenizer(None, config | {"vocab_size": size})
    return config | {
        "encoder_config": complete_encoder(config), "decoder_config": decoder, "vocab_size": size,
        "eos_token_id": 3 if tokens is None or tokens.eos_id is None else tokens.eos_id,
        "project": "encoder_decoder_proj.weight" in tensors,
    }  # fmt: skip


def _rows(config: CanaryConfig) -> list[NameRow]:
    rows = [replace(row, foreign=_decoder_name(row.foreign)) for row in canary_rows(config) if not row.reason]
    head = "log_softmax.mlp.layer0.weight"
    return [
        *renamed(rows),
        NameRow(head, reason="repeats the embedding", rebuild=lambda made: made[EMBEDDING].clone(), optional=True),
        NameRow(POSITIONS, reason="sinusoids", rebuild=lambda made: _table(config), optional=True),
        *(weight_and_bias("encoder_decoder_proj", "project") if config.project else []),
    ]


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """The archive's SentencePiece models in the order of `tokenizer.langs`, or its only one; None without them."""
    files, stated = config.get("tokenizer_files") or {}, config.get("tokenizer") or {}
    parts = list(stated.get("langs", {"": stated}).values())
    names = [str(part.get("model_path", "")).removeprefix("nemo:") for part in parts]
    if len(files) == 1 and len(parts) == 1:
        names = list(files)
    if not files or any(name not in files for name in names):
        warn_unread_tokenizer(config)
        return None
    return AggregateTokenizer([files[name] for name in names], config["vocab_size"], "tokenizer.model")


NEMO_CANARY = replace(
    CANARY, name="nemo-canary", rows=_rows, has=(EMBEDDING, POSITIONS, "encoder.pre_encode.out.weight"),
    config_from=lambda config, tensors: canary_config(config, tensors, interleaved=True), tokenizer=_tokenizer,
    complete=_complete, card=lambda folder, config: {}, needs="model_config.yaml", defaults={}, types=(),
)  # fmt: skip
