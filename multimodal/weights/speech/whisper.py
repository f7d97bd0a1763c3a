"""Whisper (Radford et al. 2022) in OpenAI's and in Hugging Face's names.

Traps: the key projections have no bias; the token embedding also gives the logits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.text_config import TextConfig
from multimodal.models.whisper import Whisper, WhisperConfig, WhisperEncoderConfig
from multimodal.system.files import optional_json
from multimodal.tokens.text.tiktokens import WhisperTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.card import SEARCH, searched
from multimodal.weights.family import Family
from multimodal.weights.speech.whisper_vocabulary import released_tokenizer
from multimodal.weights.table import NameRow, Tensors, linears, repeat, under, weight_and_bias

SUPPRESSED = "suppress_tokens", "begin_suppress_tokens"
PREPROCESSOR, GENERATION = "preprocessor_config.json", "generation_config.json"
# options of transcription by their names in generation_config.json
THRESHOLDS = "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"
TRANSCRIBE_OPTIONS = dict(zip(THRESHOLDS, THRESHOLDS, strict=True)) | {
    "condition_on_prev_tokens": "condition_on_previous_text"
}
FEATURES = {"n_fft": 400, "hop_length": 160, "sampling_rate": 16000, "dither": 0, "padding_value": 0,
            "padding_side": "right"}  # fmt: skip
# steps of 0.02 s to the latest first time: OpenAI's, and that of the files of 2023 before they were corrected
LATEST_FIRST = 50, 1
DIMENSIONS = (
    "n_mels", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
    "n_vocab", "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer",
)  # fmt: skip


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


def whisper_config(
    vocabulary: int, bands: int, encoder: tuple[int, ...], decoder: tuple[int, ...], tied: bool
) -> WhisperConfig:
    """`encoder`, `decoder`: positions, width, layers, heads and hidden width."""
    (frames, *sizes), (context, *words) = encoder, decoder
    return WhisperConfig(
        WhisperEncoderConfig(bands, frames, transformer(*sizes, key_bias=False)),
        TextConfig(
            vocabulary, context, transformer(*words, key_bias=False, source_width=sizes[0]), causal=True, tied=tied
        ),
    )


def _openai_config(config: dict[str, Any], tensors: Tensors) -> WhisperConfig:
    for key in config:
        if key not in ("dims", "vocabulary"):  # the latter of ggml files
            raise CheckpointError(f"whisper config: unknown key {key!r}")
    d = _dims(config)
    names = ("ctx", "state", "layer", "head")
    encoder, decoder = (
        (*(d[f"n_{part}_{name}"] for name in names), 4 * d[f"n_{part}_state"]) for part in ("audio", "text")
    )
    return whisper_config(d["n_vocab"], d["n_mels"], encoder, decoder, tied=True)


def _block(cross: bool) -> list[NameRow]:
    """Rows of a block; the key projections have no bias."""
    parts = {"attn": "attention"} | ({"cross_attn": "cross"} if cross else {})
    names = {f"{p}.{name}": f"{own}.{name}" for p, own in parts.items() for name in ("query", "key", "value", "out")}
    names |= {f"{part}_ln": f"{own}_branch.norm" for part, own in parts.items()}
    names |= {"mlp.0": "feed.up", "mlp.2": "feed.down", "mlp_ln": "feed_branch.norm"}
    return [row for row in linears(names) if not row.targets[0].endswith("key.bias")]


def _openai_rows(config: WhisperConfig) -> list[NameRow]:
    return [
        *weight_and_bias("encoder.conv1", "encoder.stem.first"),
        *weight_and_bias("encoder.conv2", "encoder.stem.second"),
        NameRow("encoder.positional_embedding", "encoder.positions"),
        *under("encoder.blocks.{}.", "encoder.stack.blocks.{}.", _block(cross=False)),
        *weight_and_bias("encoder.ln_post", "encoder.stack.norm"),
        NameRow("decoder.token_embedding.weight", "decoder.embed.weight"),
        NameRow("decoder.positional_embedding", "decoder.positions"),
        *under("decoder.blocks.{}.", "decoder.stack.blocks.{}.", _block(cross=True)),
        *weight_and_bias("decoder.ln", "decoder.stack.norm"),
    ]


def _openai_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return released_tokenizer(config["dims"]["n_vocab"], listed=config.get("vocabulary"))


def check_features(config: dict[str, Any], bands: int) -> None:
    """Raise CheckpointError for a spectrogram that is not Whisper's."""
    for key, only in (FEATURES | {"feature_size": bands}).items():
        if (got := config.get(PREPROCESSOR, {}).get(key, only)) != only:
            raise CheckpointError(f"{PREPROCESSOR}: {key} must be {only} (got {got!r})")


def _hf_config(config: dict[str, Any], tensors: Tensors) -> WhisperConfig:
    for key, only in {"activation_function": "gelu", "scale_embedding": False}.items():
        if config.get(key, only) != only:
            raise CheckpointError(f"whisper config: {key} must be {only!r} (got {config[key]!r})")
    check_features(config, config["num_mel_bins"])
    tied = config.get("tie_word_embeddings", True)
    head, embedding = tensors.get("proj_out.weight"), tensors.get("model.decoder.embed_tokens.weight")
    if tied and head is not None and embedding is not None and not head.equal(embedding):
        raise CheckpointError("whisper: tensor 'proj_out.weight' differs from the embedding it should repeat")
    encoder, decoder = (
        (config[f"max_{positions}_positions"], config["d_model"], config[f"{part}_layers"],
         config[f"{part}_attention_heads"], config[f"{part}_ffn_dim"])
        for part, positions in (("encoder", "source"), ("decoder", "target"))
    )  # fmt: skip
    return whisper_config(config["vocab_size"], config["num_mel_bins"], encoder, decoder, tied)


# OpenAI's names and Hugging Face's, replaced in this order (transformers, convert_openai_to_hf.py)
HF_NAMES = {
    "blocks.": "layers.", "mlp.0": "fc1", "mlp.2": "fc2", "mlp_ln": "final_layer_norm",
    "cross_attn_ln": "encoder_attn_layer_norm", "attn_ln": "self_attn_layer_norm", "cross_attn.": "encoder_attn.",
    ".attn.": ".self_attn.", "attn.query": "attn.q_proj", "attn.key": "attn.k_proj", "attn.value": "attn.v_proj",
    "attn.out": "attn.out_proj", "ln_post": "layer_norm", "decoder.ln.": "decoder.layer_norm.",
    "token_embedding": "embed_tokens", "positional_embedding": "embed_positions.weight",
}  # fmt: skip


def _hf_rows(config: WhisperConfig) -> list[NameRow]:
    embedding, head = "model.decoder.embed_tokens.weight", "proj_out.weight"

    def renamed(name: str) -> str:
        for theirs, hf in HF_NAMES.items():
            name = name.replace(theirs, hf)
        return f"model.{name}"

    rows = [replace(row, foreign=renamed(row.foreign)) for row in _openai_rows(config)]
    return [*rows, repeat(head, embedding) if config.decoder.tied else NameRow(head, "decoder.head.weight")]


def _hf_card(folder: Path | None, config: dict[str, Any]) -> dict[str, Any]:
    """Attention heads for word timestamps, options of transcription and settings of the search, which Hugging Face
    stores beside the weights; suppressed tokens stand in an old folder's config.json."""
    told = optional_json(folder / GENERATION) if folder else {}
    rules, where = (told, GENERATION) if told else ({name: config.get(name) for name in SUPPRESSED}, "config.json")
    tokenizer = released_tokenizer(config["vocab_size"])
    card = {
        "alignment_heads": told.get("alignment_heads"),
        "transcribe": tokenizer and _asked(rules, tokenizer, where),
        "generation": searched({name: told[name] for name in SEARCH if name in told and name not in SUPPRESSED}),
    }
    return {name: value for name, value in card.items() if value}


def _asked(told: dict[str, Any], t: WhisperTokenizer, where: str) -> dict[str, Any]:
    """Options that a fine-tuned model asks for where they are not those of the released models. Raises CheckpointError
    for rules without an option."""
    found: dict[str, Any] = {}
    never, first = told.get("suppress_tokens"), told.get("begin_suppress_tokens")
    if isinstance(never, list) and set(never) != set(t.suppressed_tokens()):
        found["suppress_tokens"] = never
    found |= never_first(first, t, f"{where}: begin_suppress_tokens")
    latest = told.get("max_initial_timestamp_index")
    if latest not in (None, *LATEST_FIRST):
        if type(latest) is not int or latest < 1:
            raise CheckpointError(f"{GENERATION}: max_initial_timestamp_index must be 1 or more (got {latest!r})")
        found["max_initial_timestamp"] = latest * t.SECONDS_PER_TIMESTAMP
    found |= {own: told[name] for name, own in TRANSCRIBE_OPTIONS.items() if told.get(name) is not None}
    if t.multilingual:
        if told.get("is_multilingual") is False:
            raise CheckpointError(f"{GENERATION}: is_multilingual must be true, as its vocabulary is (got False)")
        names = {i: name.strip("<|>") for name, i in t.control_ids.items()}
        stated = told.get("language") is not None or told.get("task") is not None
        forced = [] if stated else told.get("forced_decoder_ids") or []  # of older files
        old = {place: names.get(token) for place, token in forced}
        language, task = told.get("language") or old.get(1), told.get("task") or old.get(2)
        if language:
            found["language"] = language.strip("<|>")
        if task == "translate":
            found["task"] = task
    return found


def never_first(first: Any, t: WhisperTokenizer, where: str) -> dict[str, Any]:
    """Option for the tokens that no text begins with. Raises CheckpointError for others than a blank and the end."""
    blank = [*t.encode(" "), t.eot]
    if first is None or (isinstance(first, list) and sorted(map(str, first)) == sorted(map(str, blank))):
        return {}
    if first != []:
        raise CheckpointError(f"{where} must be {blank} or [] (got {first!r:.40})")
    return {"suppress_blank": False}


WHISPER_OPENAI = Family(
    "whisper", Whisper, ("encoder.conv1.weight", "decoder.token_embedding.weight"), _openai_config, _openai_rows,
    _openai_tokenizer,
)  # fmt: skip
WHISPER_HF = Family(
    "whisper-hf", Whisper, ("model.encoder.conv1.weight", "model.decoder.embed_tokens.weight"), _hf_config, _hf_rows,
    lambda folder, config: released_tokenizer(config["vocab_size"], folder), card=_hf_card, types=("", "whisper"),
    beside=PREPROCESSOR,
)  # fmt: skip
