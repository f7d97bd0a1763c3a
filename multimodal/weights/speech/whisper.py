"""Whisper (Radford et al. 2022) in OpenAI's and in Hugging Face's names.

Traps: the key projections have no bias; the token embedding also gives the logits."""

from pathlib import Path
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text_config import TextConfig
from multimodal.models.whisper import Whisper, WhisperConfig, WhisperEncoderConfig
from multimodal.system.files import read_json
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.tokens.text.vocabulary import tokenizer_from
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, linears, repeat, under, weight_and_bias

DIMENSIONS = (
    "n_mels", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
    "n_vocab", "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer",
)  # fmt: skip
# vocabulary sizes of the released models; large-v3 and later have one more language
TOKENIZERS = {51864: "whisper-en", 51865: "whisper", 51866: "whisper-v3"}


def _tokenizer(vocabulary: int | None) -> Tokenizer | None:
    """The released vocabulary of this size, or None."""
    return tokenizer_from(TOKENIZERS[vocabulary]) if vocabulary in TOKENIZERS else None


def _dims(config: dict[str, Any]) -> dict[str, int]:
    dims = config["dims"]
    if not isinstance(dims, dict):
        raise CheckpointError(f"whisper dims: expected sizes by name, got {dims!r}")
    for name, value in dims.items():
        if name not in DIMENSIONS:
            raise CheckpointError(f"whisper dims: unknown key {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"whisper dims: {name} must be a positive integer (got {value!r})")
    return {name: dims[name] for name in DIMENSIONS}


def _openai_config(config: dict[str, Any], tensors: Tensors) -> WhisperConfig:
    for key in config:
        if key != "dims":
            raise CheckpointError(f"whisper config: unknown key {key!r}")
    d = _dims(config)
    encoder = transformer(
        d["n_audio_state"], d["n_audio_layer"], d["n_audio_head"], 4 * d["n_audio_state"], key_bias=False
    )
    decoder = transformer(
        d["n_text_state"], d["n_text_layer"], d["n_text_head"], 4 * d["n_text_state"], key_bias=False,
        source_width=d["n_audio_state"],
    )  # fmt: skip
    return WhisperConfig(
        WhisperEncoderConfig(d["n_mels"], d["n_audio_ctx"], encoder),
        TextConfig(d["n_vocab"], d["n_text_ctx"], decoder, causal=True, tied=True),
    )


def _block(names: dict[str, str]) -> list[NameRow]:
    """Rows of a block; the key projections have no bias."""
    return [row for row in linears(names) if not row.targets[0].endswith("key.bias")]


def _openai_block(cross: bool) -> list[NameRow]:
    parts = {"attn": "attention"} | ({"cross_attn": "cross"} if cross else {})
    names = {f"{p}.{name}": f"{own}.{name}" for p, own in parts.items() for name in ("query", "key", "value", "out")}
    names |= {f"{part}_ln": f"{own}_branch.norm" for part, own in parts.items()}
    return _block(names | {"mlp.0": "feed.up", "mlp.2": "feed.down", "mlp_ln": "feed_branch.norm"})


def _openai_rows(config: WhisperConfig) -> list[NameRow]:
    return [
        *weight_and_bias("encoder.conv1", "encoder.stem.first"),
        *weight_and_bias("encoder.conv2", "encoder.stem.second"),
        NameRow("encoder.positional_embedding", "encoder.positions"),
        *under("encoder.blocks.{}.", "encoder.stack.blocks.{}.", _openai_block(cross=False)),
        *weight_and_bias("encoder.ln_post", "encoder.stack.norm"),
        NameRow("decoder.token_embedding.weight", "decoder.embed.weight"),
        NameRow("decoder.positional_embedding", "decoder.positions"),
        *under("decoder.blocks.{}.", "decoder.stack.blocks.{}.", _openai_block(cross=True)),
        *weight_and_bias("decoder.ln", "decoder.stack.norm"),
    ]


def _openai_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return _tokenizer(config["dims"]["n_vocab"])


def _hf_config(config: dict[str, Any], tensors: Tensors) -> WhisperConfig:
    for key, only in {"activation_function": "gelu", "scale_embedding": False}.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"whisper config: {key} must be {only!r} (got {config[key]!r})")
    tied = config.get("tie_word_embeddings", True)
    head, embedding = tensors.get("proj_out.weight"), tensors.get("model.decoder.embed_tokens.weight")
    if tied and head is not None and embedding is not None and not head.equal(embedding):
        raise CheckpointError("whisper: tensor 'proj_out.weight' differs from the embedding it should repeat")
    width = config["d_model"]
    encoder = transformer(
        width, config["encoder_layers"], config["encoder_attention_heads"], config["encoder_ffn_dim"], key_bias=False
    )
    decoder = transformer(
        width, config["decoder_layers"], config["decoder_attention_heads"], config["decoder_ffn_dim"],
        key_bias=False, source_width=width,
    )  # fmt: skip
    return WhisperConfig(
        WhisperEncoderConfig(config["num_mel_bins"], config["max_source_positions"], encoder),
        TextConfig(config["vocab_size"], config["max_target_positions"], decoder, causal=True, tied=tied),
    )


def _hf_block(cross: bool) -> list[NameRow]:
    parts = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if cross else {})
    projections = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    names = {f"{p}.{foreign}": f"{own}.{name}" for p, own in parts.items() for foreign, name in projections.items()}
    names |= {f"{part}_layer_norm": f"{own}_branch.norm" for part, own in parts.items()}
    return _block(names | {"fc1": "feed.up", "fc2": "feed.down", "final_layer_norm": "feed_branch.norm"})


def _hf_rows(config: WhisperConfig) -> list[NameRow]:
    embedding = "model.decoder.embed_tokens.weight"
    head = "proj_out.weight"
    return [
        *weight_and_bias("model.encoder.conv1", "encoder.stem.first"),
        *weight_and_bias("model.encoder.conv2", "encoder.stem.second"),
        NameRow("model.encoder.embed_positions.weight", "encoder.positions"),
        *under("model.encoder.layers.{}.", "encoder.stack.blocks.{}.", _hf_block(cross=False)),
        *weight_and_bias("model.encoder.layer_norm", "encoder.stack.norm"),
        NameRow(embedding, "decoder.embed.weight"),
        NameRow("model.decoder.embed_positions.weight", "decoder.positions"),
        *under("model.decoder.layers.{}.", "decoder.stack.blocks.{}.", _hf_block(cross=True)),
        *weight_and_bias("model.decoder.layer_norm", "decoder.stack.norm"),
        repeat(head, embedding) if config.decoder.tied else NameRow(head, "decoder.head.weight"),
    ]


def _hf_card(folder: Path | None) -> dict[str, Any]:
    """Attention heads for word timestamps, which Hugging Face stores beside the weights."""
    path = None if folder is None else folder / "generation_config.json"
    heads = read_json(path).get("alignment_heads") if path is not None and path.exists() else None
    return {} if heads is None else {"alignment_heads": heads}


WHISPER_OPENAI = Family(
    "whisper", Whisper,
    lambda tensors, config: "encoder.conv1.weight" in tensors and "decoder.token_embedding.weight" in tensors,
    _openai_config, _openai_rows, _openai_tokenizer,
)  # fmt: skip
WHISPER_HF = Family(
    "whisper-hf", Whisper,
    lambda tensors, config: (
        "model.encoder.conv1.weight" in tensors
        and "model.decoder.embed_tokens.weight" in tensors
        and config.get("model_type", "whisper") == "whisper"
    ),
    _hf_config, _hf_rows, lambda folder, config: _tokenizer(config["vocab_size"]), card=_hf_card,
)  # fmt: skip
