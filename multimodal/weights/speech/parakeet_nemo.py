"""Parakeet and other FastConformers of NeMo: `.nemo` archives with CTC, RNN-T or TDT, and hybrids of these.

Values that NeMo leaves to be interpolated ("${…}") are read from the shapes of the tensors."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.conformer import ConformerCTC
from multimodal.models.speech.transducer import Transducer
from multimodal.tokens.text.sentencepiece import SentencePieceTokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.speech.parakeet import PARAKEET_CTC, PARAKEET_TRANSDUCER, ctc_rows, transducer_rows
from multimodal.weights.table import NameRow, Tensors

# of values that give other results, those that are computed, by section; a missing one has NeMo's default: that of
# `DEFAULTS`, else the first
ONLY: dict[str, dict[str, Any]] = {
    "preprocessor": {"sample_rate": 16000, "window_size": 0.025, "window_stride": 0.01, "window": "hann",
                     "normalize": "per_feature", "n_fft": (512, None), "frame_splicing": 1, "log": True,
                     "preemph": 0.97, "n_window_size": None, "n_window_stride": None, "lowfreq": 0,
                     "highfreq": (None, 8000), "log_zero_guard_type": "add", "log_zero_guard_value": 2**-24,
                     "exact_pad": False, "stft_exact_pad": False, "mag_power": 2, "mel_norm": "slaney"},
    "encoder": {"subsampling": "dw_striding", "causal_downsampling": False, "conv_norm_type": "batch_norm",
                "conv_context_size": None, "att_context_style": "regular", "reduction": None, "untie_biases": True,
                "global_tokens": 0},
}  # fmt: skip
DEFAULTS = {"window_size": 0.02, "subsampling": "striding"}
UNLIMITED = 1000  # tokens a frame, where NeMo has no limit; more would be an endless loop
LOCAL = ("rel_pos", "rel_pos_local_attn")
# transformers' names and NeMo's, replaced in this order
NAMES = {
    r"^encoder\.subsampling\.layers": "encoder.pre_encode.conv",
    r"^encoder\.subsampling\.linear": "encoder.pre_encode.out",
    r"\.conv\.norm\.": ".conv.batch_norm.", r"self_attn\.([qkv])_proj": r"self_attn.linear_\1",
    r"self_attn\.o_proj": "self_attn.linear_out", "relative_k_proj": "linear_pos", r"bias_([uv])$": r"pos_bias_\1",
    r"^ctc_head": "decoder.decoder_layers.0", r"^encoder_projector": "joint.enc",
    r"^decoder\.decoder_projector": "joint.pred", r"^decoder\.embedding": "decoder.prediction.embed",
    r"^decoder\.lstm": "decoder.prediction.dec_rnn.lstm", r"^joint\.head": "joint.joint_net.2",
}  # fmt: skip
FEATURES = "computed from the audio alone"
HYBRID = "a second head, for training; the transducer transcribes"


def renamed(rows: list[NameRow]) -> list[NameRow]:
    """Rows of a FastConformer in NeMo's names."""

    def name(foreign: str) -> str:
        for theirs, nemo in NAMES.items():
            foreign = re.sub(theirs, nemo, foreign)
        return foreign

    dropped = {f"preprocessor.featurizer.{part}": FEATURES for part in ("window", "fb")}
    dropped |= {f"ctc_decoder.decoder_layers.0.{part}": HYBRID for part in ("weight", "bias")}
    return [
        *(replace(row, foreign=name(row.foreign)) for row in rows),
        *(NameRow(foreign, reason=reason, optional=True) for foreign, reason in dropped.items()),
    ]


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"nemo config: {name} must be a table (got {section!r:.40})")
    for key, only in ONLY.get(name, {}).items():
        known = only if isinstance(only, tuple) else (only,)
        value = section.get(key, DEFAULTS.get(key, known[0]))
        if value not in known:
            told = " or ".join(map(repr, known))
            raise CheckpointError(f"nemo config: {name}: {key} must be {told} (got {value!r:.40})")
    return section


def _near(encoder: dict[str, Any]) -> list[int]:
    """Frames before and after that attention sees; -1: all."""
    context = encoder.get("att_context_size") or [-1, -1]
    whole = isinstance(context, list) and len(context) == 2 and all(type(side) is int for side in context)
    if encoder.get("self_attention_model", "rel_pos") not in LOCAL or not whole:
        raise CheckpointError(
            f"nemo config: encoder: expected self_attention_model {' or '.join(LOCAL)} with one att_context_size (got "
            f"{encoder.get('self_attention_model')!r:.40}, {context!r:.40})"
        )
    return context


def complete_encoder(config: dict[str, Any]) -> dict[str, Any]:
    """The encoder's configuration as transformers writes it. Raises CheckpointError."""
    encoder, features = _section(config, "encoder"), _section(config, "preprocessor")
    if (bands := features.get("features", 64)) != encoder["feat_in"]:
        raise CheckpointError(
            f"nemo config: preprocessor has {bands} features, encoder's feat_in is {encoder['feat_in']}"
        )
    width, bias = encoder["d_model"], encoder.get("use_bias", True)
    channels, scaled = encoder.get("subsampling_conv_channels", -1), encoder.get("xscaling", True)
    return {
        "hidden_size": width, "num_attention_heads": encoder["n_heads"], "num_hidden_layers": encoder["n_layers"],
        "intermediate_size": int(encoder.get("ff_expansion_factor", 4) * width), "num_mel_bins": encoder["feat_in"],
        "conv_kernel_size": encoder["conv_kernel_size"], "subsampling_factor": encoder["subsampling_factor"],
        "subsampling_conv_channels": width if channels == -1 else channels, "scale_input": scaled,
        "attention_bias": bias, "convolution_bias": bias, "near": _near(encoder),
    }  # fmt: skip


def _complete(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The configuration as transformers writes it."""
    made = complete_encoder(config)
    if "decoder.decoder_layers.0.weight" in tensors:
        size = len(tensors["decoder.decoder_layers.0.weight"])
        return config | {"encoder_config": made, "vocab_size": size, "pad_token_id": size - 1}
    return config | {"encoder_config": made} | _transducer(config, tensors)


def _transducer(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    size, width = tensors["decoder.prediction.embed.weight"].shape
    layers = len({name for name in tensors if name.startswith("decoder.prediction.dec_rnn.lstm.weight_ih_l")})
    joint = _section(config, "joint").get("jointnet") or {}
    durations = next((found for found in _durations(config) if isinstance(found, list)), [])
    outputs = len(tensors["joint.joint_net.2.weight"])
    if outputs != size + len(durations):
        raise CheckpointError(
            f"nemo config: {size} tokens with the blank and {len(durations)} durations, but "
            f"'joint.joint_net.2.weight' has {outputs} outputs"
        )
    return {
        "vocab_size": size, "blank_token_id": size - 1, "decoder_hidden_size": width, "num_decoder_layers": layers,
        "joint_hidden_size": len(tensors["joint.enc.weight"]), "hidden_act": joint.get("activation", "relu"),
        "durations": durations, "max_symbols_per_step": _most_symbols(config),
    }  # fmt: skip


def _most_symbols(config: dict[str, Any]) -> int:
    greedy = (config.get("decoding") or {}).get("greedy")
    if greedy is None:
        return 10
    most = greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or UNLIMITED
    if type(most) is not int:
        raise CheckpointError(f"nemo config: decoding: max_symbols must be a whole number (got {most!r:.40})")
    return most


def _durations(config: dict[str, Any]) -> list[Any]:
    """Values of the three places where NeMo may state the durations of a TDT."""
    sections = {name: config.get(name) or {} for name in ("model_defaults", "decoding", "loss")}
    kwargs = sections["loss"].get("tdt_kwargs") or {}
    return [
        sections["model_defaults"].get("tdt_durations"),
        sections["decoding"].get("durations"),
        kwargs.get("durations"),
    ]


def warn_unread_tokenizer(config: dict[str, Any]) -> None:
    kind = (config.get("tokenizer") or {}).get("type") or "letters"
    warnings.warn(f"nemo config: a tokenizer of type {kind} is not read, so the model cannot transcribe", stacklevel=2)


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """The archive's SentencePiece model; None without one."""
    proto = config.get("sentencepiece")
    if proto is None:
        warn_unread_tokenizer(config)
        return None
    made = SentencePieceTokenizer("tokenizer.model", pad_id=0, proto=proto)
    if made.vocab_size != config["vocab_size"] - 1:
        raise CheckpointError(
            f"tokenizer.model has {made.vocab_size} tokens, the weights {config['vocab_size'] - 1} and the blank"
        )
    return made


NEMO_CTC = replace(
    PARAKEET_CTC, name="nemo-ctc", model=ConformerCTC, rows=lambda config: renamed(ctc_rows(config)),
    has=("decoder.decoder_layers.0.weight", "encoder.pre_encode.out.weight"), tokenizer=_tokenizer,
    complete=_complete, card=lambda folder, config: {}, needs="model_config.yaml",
)  # fmt: skip
NEMO_TRANSDUCER = replace(
    PARAKEET_TRANSDUCER, name="nemo-transducer", model=Transducer,
    rows=lambda config: renamed(transducer_rows(config)),
    has=("joint.joint_net.2.weight", "encoder.pre_encode.out.weight"), tokenizer=_tokenizer, complete=_complete,
    card=lambda folder, config: {}, needs="model_config.yaml",
)  # fmt: skip
