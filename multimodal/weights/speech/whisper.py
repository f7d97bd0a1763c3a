"""Whisper (Radford et al. 2022) in OpenAI's and in Hugging Face's names.

The key projections have no bias, and the logits go through the transposed token embedding."""

from pathlib import Path
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.speech import SpeechEncoderConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.whisper import SpeechToText, SpeechToTextConfig
from multimodal.system.files import read_json
from multimodal.tokens.text.vocabulary import Tokenizer, tokenizer_from
from multimodal.weights.family import Family
from multimodal.weights.table import Row, Tensors, under, weight_and_bias

DIMENSIONS = (
    "n_mels", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
    "n_vocab", "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer",
)  # fmt: skip
# vocabulary sizes of the released models; large-v3 and later know one language more
TOKENIZERS = {51864: "whisper-en", 51865: "whisper", 51866: "whisper-v3"}


def _tokenizer(vocabulary: int | None) -> Tokenizer | None:
    """The released vocabulary of that size. A fine-tuned one of another size is not known from the weights."""
    return tokenizer_from(TOKENIZERS[vocabulary]) if vocabulary in TOKENIZERS else None


def _dims(config: dict[str, Any]) -> dict[str, int]:
    dims = config["dims"]
    if not isinstance(dims, dict):
        raise CheckpointError(f"whisper dims: not a table of sizes ({dims!r})")
    for name, value in dims.items():
        if name not in DIMENSIONS:
            raise CheckpointError(f"whisper dims: unknown key {name!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"whisper dims: {name} is not a size ({value!r})")
    return {name: dims[name] for name in DIMENSIONS}


def _openai_config(config: dict[str, Any], tensors: Tensors) -> SpeechToTextConfig:
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
    return SpeechToTextConfig(
        SpeechEncoderConfig(d["n_mels"], d["n_audio_ctx"], encoder),
        TextConfig(d["n_vocab"], d["n_text_ctx"], decoder, causal=True, tied=True),
    )


def _attention(foreign: str, ours: str, query: str, key: str, value: str, out: str) -> list[Row]:
    names = {query: "query", value: "value", out: "out"}
    rows = [row for theirs, own in names.items() for row in weight_and_bias(foreign + theirs, ours + own)]
    return [*rows, Row(f"{foreign}{key}.weight", f"{ours}key.weight")]


def _openai_block(cross: bool) -> list[Row]:
    names = ("query", "key", "value", "out")
    rows = _attention("attn.", "attention.", *names) + weight_and_bias("attn_ln", "attention_branch.norm")
    if cross:
        rows += _attention("cross_attn.", "cross.", *names) + weight_and_bias("cross_attn_ln", "cross_branch.norm")
    rows += weight_and_bias("mlp.0", "feed.up") + weight_and_bias("mlp.2", "feed.down")
    return rows + weight_and_bias("mlp_ln", "feed_branch.norm")


def _openai_rows(config: SpeechToTextConfig) -> list[Row]:
    return [
        *weight_and_bias("encoder.conv1", "encoder.stem.first"),
        *weight_and_bias("encoder.conv2", "encoder.stem.second"),
        Row("encoder.positional_embedding", "encoder.positions"),
        *under("encoder.blocks.{}.", "encoder.stack.blocks.{}.", _openai_block(cross=False)),
        *weight_and_bias("encoder.ln_post", "encoder.stack.norm"),
        Row("decoder.token_embedding.weight", "decoder.embed.weight"),
        Row("decoder.positional_embedding", "decoder.positions"),
        *under("decoder.blocks.{}.", "decoder.stack.blocks.{}.", _openai_block(cross=True)),
        *weight_and_bias("decoder.ln", "decoder.stack.norm"),
    ]


def _openai_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return _tokenizer(config["dims"]["n_vocab"])


def _hf_config(config: dict[str, Any], tensors: Tensors) -> SpeechToTextConfig:
    for key, only in {"activation_function": "gelu", "scale_embedding": False}.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"whisper config: {key} is {config[key]!r}, and only {only!r} is known")
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
    return SpeechToTextConfig(
        SpeechEncoderConfig(config["num_mel_bins"], config["max_source_positions"], encoder),
        TextConfig(config["vocab_size"], config["max_target_positions"], decoder, causal=True, tied=tied),
    )


def _hf_block(cross: bool) -> list[Row]:
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    rows = _attention("self_attn.", "attention.", *names)
    rows += weight_and_bias("self_attn_layer_norm", "attention_branch.norm")
    if cross:
        rows += _attention("encoder_attn.", "cross.", *names)
        rows += weight_and_bias("encoder_attn_layer_norm", "cross_branch.norm")
    rows += weight_and_bias("fc1", "feed.up") + weight_and_bias("fc2", "feed.down")
    return rows + weight_and_bias("final_layer_norm", "feed_branch.norm")


def _hf_rows(config: SpeechToTextConfig) -> list[Row]:
    embedding = "model.decoder.embed_tokens.weight"
    repeat = Row(
        "proj_out.weight", reason="repeats the token embedding; many files leave it out", optional=True,
        rebuild=lambda foreign: foreign[embedding],
    )  # fmt: skip
    return [
        *weight_and_bias("model.encoder.conv1", "encoder.stem.first"),
        *weight_and_bias("model.encoder.conv2", "encoder.stem.second"),
        Row("model.encoder.embed_positions.weight", "encoder.positions"),
        *under("model.encoder.layers.{}.", "encoder.stack.blocks.{}.", _hf_block(cross=False)),
        *weight_and_bias("model.encoder.layer_norm", "encoder.stack.norm"),
        Row(embedding, "decoder.embed.weight"),
        Row("model.decoder.embed_positions.weight", "decoder.positions"),
        *under("model.decoder.layers.{}.", "decoder.stack.blocks.{}.", _hf_block(cross=True)),
        *weight_and_bias("model.decoder.layer_norm", "decoder.stack.norm"),
        repeat if config.decoder.tied else Row("proj_out.weight", "decoder.head.weight"),
    ]


def _hf_card(folder: Path | None) -> dict[str, Any]:
    """The heads that word times come from, which Hugging Face keeps beside the weights."""
    path = None if folder is None else folder / "generation_config.json"
    heads = read_json(path).get("alignment_heads") if path is not None and path.exists() else None
    return {} if heads is None else {"alignment_heads": heads}


WHISPER_OPENAI = Family(
    "whisper", SpeechToText,
    lambda tensors, config: "encoder.conv1.weight" in tensors and "decoder.token_embedding.weight" in tensors,
    _openai_config, _openai_rows, _openai_tokenizer,
)  # fmt: skip
WHISPER_HF = Family(
    "whisper-hf", SpeechToText,
    lambda tensors, config: (
        "model.encoder.conv1.weight" in tensors
        and "model.decoder.embed_tokens.weight" in tensors
        and config.get("model_type", "whisper") == "whisper"
    ),
    _hf_config, _hf_rows, lambda folder, config: _tokenizer(config["vocab_size"]), card=_hf_card,
)  # fmt: skip
