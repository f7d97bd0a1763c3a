"""Qwen2-Audio (Chu et al. 2024) and Voxtral (Liu et al. 2025) in transformers' names.

Traps: both have Whisper's encoder. Qwen2-Audio masks padding in it, means pairs of states and norms them after; Voxtral
attends to padding, and merges four states to one row."""

from functools import partial
from pathlib import Path
from typing import Any

from multimodal.blocks.connector import ConnectorConfig
from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.models.whisper import WhisperEncoderConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.any.chat import chat_format
from multimodal.weights.any.parts import decoder_config, decoder_rows, decoder_tokenizer, perceptron_rows
from multimodal.weights.family import Family, activation
from multimodal.weights.speech.whisper import PREPROCESSOR, check_features
from multimodal.weights.table import NameRow, Tensors, linears, under, weight_and_bias

SIZES = {"num_mel_bins": 128, "max_source_positions": 1500, "scale_embedding": False, "activation_function": "gelu"}
# the two spellings of the others
SPELT = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_ffn_dim": "intermediate_size",
         "encoder_attention_heads": "num_attention_heads"}  # fmt: skip
USUAL = {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120, "encoder_attention_heads": 20}
VOXTRAL_TEXT = {"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
                "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                "rope_theta": 1e8, "head_dim": 128}  # fmt: skip
QWEN2_MARKERS = {"audio": "<|AUDIO|>"}
HAS = ("audio_tower.conv1.weight", "language_model.model.embed_tokens.weight")


def encoder_config(config: dict[str, Any], final_norm: bool) -> WhisperEncoderConfig:
    """Raises CheckpointError for options that Whisper's encoder lacks, and for another spectrogram."""
    audio = SIZES | (config.get("audio_config") or {})
    check_features(config, audio["num_mel_bins"])
    if audio["scale_embedding"] or audio["activation_function"] != "gelu":
        raise CheckpointError("config.json: audio_config with scale_embedding or another activation is not supported")
    width, layers, hidden, heads = (audio.get(key, audio.get(other, USUAL[key])) for key, other in SPELT.items())
    stack = transformer(width, layers, heads, hidden, key_bias=False, final_norm=final_norm)
    return WhisperEncoderConfig(audio["num_mel_bins"], audio["max_source_positions"], stack)


def encoder_rows(norm: str) -> list[NameRow]:
    """`norm`: our name of the last norm."""
    names = {f"self_attn.{theirs}_proj": f"attention.{own}"
             for theirs, own in (("q", "query"), ("v", "value"), ("out", "out"))}  # fmt: skip
    names |= {"self_attn_layer_norm": "attention_branch.norm", "final_layer_norm": "feed_branch.norm"}
    names |= {"fc1": "feed.up", "fc2": "feed.down"}
    block = [*linears(names), NameRow("self_attn.k_proj.weight", "attention.key.weight")]
    rows = [
        *linears({"conv1": "audio.stem.first", "conv2": "audio.stem.second", "layer_norm": norm}),
        NameRow("embed_positions.weight", "audio.positions"),
        *under("layers.{}.", "audio.stack.blocks.{}.", block),
    ]
    return under("audio_tower.", "", rows)


def qwen2_config(config: dict[str, Any], tensors: Tensors) -> AnyToTextConfig:
    audio, decoder = encoder_config(config, final_norm=False), decoder_config(config, tensors, "qwen2")
    connector = ConnectorConfig(audio.width, decoder.width, pool=2, norm=True)
    ids = (config.get("audio_token_id", config["audio_token_index"]),)
    return AnyToTextConfig(decoder, ids, audio=audio, audio_connector=connector, audio_masked=True)


def qwen2_rows(config: AnyToTextConfig) -> list[NameRow]:
    return [
        *encoder_rows("audio_connector.norm"), *weight_and_bias("multi_modal_projector.linear", "audio_connector.out"),
        *decoder_rows(config.decoder),
    ]  # fmt: skip


def voxtral_complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    return config | {"text_config": VOXTRAL_TEXT | (config.get("text_config") or {})}


def voxtral_config(config: dict[str, Any], tensors: Tensors) -> AnyToTextConfig:
    audio, decoder = encoder_config(config, final_norm=True), decoder_config(config, tensors, "llama")
    stacked, left = divmod(audio.stack.block.hidden, audio.width)
    if left or audio.context % stacked:
        raise CheckpointError(f"config.json: {audio.context} states of {audio.width} do not merge by {stacked}")
    connector = ConnectorConfig(
        audio.width, decoder.width, stack=stacked, hidden=decoder.width,
        activation=activation({"projector_hidden_act": "gelu"} | config, "projector_hidden_act"), bias=False,
    )  # fmt: skip
    return AnyToTextConfig(decoder, (config["audio_token_id"],), audio=audio, audio_connector=connector)


def voxtral_rows(config: AnyToTextConfig) -> list[NameRow]:
    return [
        *encoder_rows("audio.stack.norm"),
        *perceptron_rows("multi_modal_projector.", "audio_connector.", bias=False),
        *decoder_rows(config.decoder),
    ]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    if config["model_type"] == "qwen2_audio":
        return decoder_tokenizer(folder, config, "qwen2", QWEN2_MARKERS)
    return decoder_tokenizer(folder, config, "llama", {})


QWEN2_AUDIO = Family(
    "qwen2-audio", AnyToText, (*HAS, "multi_modal_projector.linear.weight"), qwen2_config, qwen2_rows, tokenizer,
    needs="config.json", defaults={"audio_token_index": 151646}, types=("qwen2_audio",),
    beside=PREPROCESSOR,
    chat=partial(chat_format, **QWEN2_MARKERS),
)  # fmt: skip
VOXTRAL = Family(
    "voxtral", AnyToText, (*HAS, "multi_modal_projector.linear_1.weight"), voxtral_config, voxtral_rows, tokenizer,
    complete=voxtral_complete, needs="config.json", beside=PREPROCESSOR, defaults={"audio_token_id": 24},
    types=("voxtral",),
)  # fmt: skip
