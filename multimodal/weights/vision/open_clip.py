"""OpenCLIP's configurations: `open_clip_config.json`, or an architecture that open_clip installs."""

import difflib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from multimodal.blocks.stack import StackConfig, transformer
from multimodal.errors import CheckpointError, UsageError
from multimodal.models.text_config import TextConfig
from multimodal.system.assets import open_clip_file
from multimodal.system.files import shown
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.clip import CLIPTokenizer
from multimodal.tokens.text.hub.files import open_clip_text
from multimodal.tokens.text.sentencepiece import SigLIPText
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.vision.image_processor import per_channel

# open_clip's defaults (CLIPVisionCfg, CLIPTextCfg)
VISION = {
    "layers": 12, "width": 768, "head_width": 64, "mlp_ratio": 4.0, "patch_size": 16, "image_size": 224,
    "ls_init_value": None, "no_ln_pre": False, "final_ln_after_pool": False, "pool_type": "tok",
    "act_kwargs": None, "norm_kwargs": None,
}  # fmt: skip
TRUNK = {"timm_model_name": None, "timm_pool": "avg", "timm_proj": "linear", "timm_proj_bias": False, "image_size": 224}
TEXT = {
    "context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0,
    "ls_init_value": None, "eos_id": 2, "no_causal_mask": False, "pool_type": "argmax", "proj_bias": False,
    "proj_type": "linear", "act_kwargs": None, "norm_kwargs": None,
}  # fmt: skip
PIXELS = {"mode": "RGB", "resize_mode": "shortest", "interpolation": "bicubic", "mean": OPENAI_MEAN, "std": OPENAI_STD,
          "fill_color": 0}  # fmt: skip
MODEL = {"embed_dim": None, "vision_cfg": None, "text_cfg": None, "quick_gelu": False, "init_logit_bias": None}
# keys for training, initial values or text preparation, which do not change what the weights compute
INERT = frozenset(
    ["patch_dropout", "output_tokens", "attn_pooler_queries", "attn_pooler_heads", "pos_embed_type", "timm_pool",
     "timm_proj", "timm_drop", "timm_drop_path", "timm_model_pretrained", "hf_tokenizer_name", "tokenizer_mode",
     "tokenizer_kwargs", "pad_id", "custom_text", "init_logit_scale", "nonscalar_logit_scale"]
)  # fmt: skip


def settings(record: dict[str, Any], defaults: dict[str, Any], part: str) -> dict[str, Any]:
    """`record` over `defaults`. Raises CheckpointError for an unknown key that is set."""
    for key, value in record.items():
        if key not in defaults and key not in INERT and value not in (None, False):
            raise unsupported(part + key, value)
    return defaults | record


def unsupported(option: str, value: Any) -> CheckpointError:
    return CheckpointError(f"OpenCLIP configuration: {option} {shown(value)} is not supported")


def model_settings(config: dict[str, Any], defaults: dict[str, Any] = MODEL) -> dict[str, Any]:
    """Model part of a configuration. Raises CheckpointError if there is none."""
    record = config.get("model_cfg", config)
    if "vision_cfg" not in record or "text_cfg" not in record or "embed_dim" not in record:
        raise CheckpointError(
            "OpenCLIP weights without open_clip_config.json: give their architecture, such as architecture='ViT-B-32', "
            "since the weights do not state the activation and the number of heads"
        )
    return settings(record, defaults, "")


def tower(part: dict[str, Any], heads: int, quick: bool, final_norm: bool = True) -> StackConfig:
    """Blocks of one tower. Raises CheckpointError for an unknown activation."""
    activations = {"null": "quick_gelu" if quick else "gelu", '{"approximate": "tanh"}': "gelu_tanh"}
    options = json.dumps(part["act_kwargs"] or None)
    if options not in activations or (quick and part["act_kwargs"]):
        raise CheckpointError(f"OpenCLIP configuration: act_kwargs {options} (quick_gelu {quick}) is not supported")
    return transformer(
        part["width"], part["layers"], heads, int(part["width"] * part["mlp_ratio"]), activation=activations[options],
        norm_eps=_norm_eps(part["norm_kwargs"] or {}), layer_scale=part["ls_init_value"] is not None,
        final_norm=final_norm,
    )  # fmt: skip


def _norm_eps(norm: dict[str, Any]) -> float:
    if set(norm) - {"eps"}:
        raise unsupported("norm_kwargs", norm)
    return norm.get("eps", 1e-5)


def text_part(model: dict[str, Any]) -> tuple[TextConfig, dict[str, Any]]:
    """Text tower, and the fields of CLIPConfig that follow from it."""
    text = settings(model["text_cfg"], TEXT, "text_cfg.")
    stack = tower(text, text["heads"], bool(model["quick_gelu"]))
    config = TextConfig(text["vocab_size"], text["context_length"], stack, causal=not text["no_causal_mask"])
    # argmax: the end of text is the highest id, also where CLIP's vocabulary has fewer ids than the model rows
    last = text["vocab_size"] - 1
    last = last if text.get("hf_tokenizer_name") else min(last, CLIPTokenizer.eos_id)
    pools = {"argmax": ("eos", last), "eos": ("eos", text["eos_id"]), "last": ("last", -1)}
    if text["pool_type"] not in pools or text["proj_type"] not in ("linear", "none"):
        raise CheckpointError(
            f"OpenCLIP configuration: text_cfg pool_type {text['pool_type']!r} with proj_type "
            f"{text['proj_type']!r} is not supported"
        )
    pool, eos = pools[text["pool_type"]]
    project = text["proj_type"] != "none"
    return config, {"text_pool": pool, "eos_id": eos, "text_bias": project and text["proj_bias"],
                    "text_project": project}  # fmt: skip


def open_clip_preprocessing(folder: Path | None, config: dict[str, Any]) -> Preprocessing | None:
    """From `preprocess_cfg`; None without it, since weights of one architecture differ. The size is the model's, as in
    open_clip. Raises CheckpointError for options that open_clip does not have."""
    record = config.get("preprocess_cfg")
    if record is None:
        return None
    size = pair(config.get("model_cfg", config).get("vision_cfg", {}).get("image_size", 224))
    record = PIXELS | {key: value for key, value in record.items() if value}  # null is the default in open_clip, and 0
    for key, known in (("mode", ("RGB",)), ("resize_mode", ("shortest", "longest", "squash")),
                       ("interpolation", ("bicubic", "bilinear", "random"))):  # fmt: skip
        if record[key] not in known:
            raise unsupported(f"preprocess_cfg.{key}", record[key])
    mode, interpolation = record["resize_mode"], record["interpolation"].replace("random", "bicubic")
    mean, std = (per_channel(record[key], f"OpenCLIP configuration: preprocess_cfg.{key}") for key in ("mean", "std"))
    if mode == "shortest" and size[0] != size[1]:
        interpolation = "bicubic"  # open_clip's ResizeKeepRatio gets no other
    return Preprocessing(size, mode, interpolation, mean, std, record["fill_color"], 1.0)


def open_clip_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """CLIP's vocabulary, SigLIP's if the folder holds its SentencePiece file, or that of its `tokenizer.json`; else
    None. Raises CheckpointError for options of a tokenizer that we do not have."""
    text = config.get("model_cfg", config).get("text_cfg", {})
    size, context = text.get("vocab_size", 49408), text.get("context_length", 77)
    options = dict(text.get("tokenizer_kwargs") or {})
    if not text.get("hf_tokenizer_name") and size >= CLIPTokenizer.vocab_size:
        if options not in ({}, {"clean": "lower"}):
            raise unsupported("text_cfg.tokenizer_kwargs", options)
        return CLIPTokenizer(context)
    clean, strip_sep = options.pop("clean", "whitespace"), bool(options.pop("strip_sep_token", False))
    canonical = clean == "canonicalize"
    if folder is None:
        return None
    if (folder / "spiece.model").exists() and canonical and size == 32000:
        return SigLIPText(folder / "spiece.model", context)
    if not text.get("hf_tokenizer_name"):
        return None
    if options or clean not in ("canonicalize", "whitespace"):
        raise unsupported("text_cfg.tokenizer_kwargs", text["tokenizer_kwargs"])
    if text.get("tokenizer_mode"):
        raise unsupported("text_cfg.tokenizer_mode", text["tokenizer_mode"])
    return open_clip_text(folder, size, context, canonical, strip_sep)


def pair(size: int | list[int]) -> tuple[int, int]:
    """(height, width) of a size given as one number or two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


@lru_cache(maxsize=1)
def _architectures() -> dict[str, Path]:
    return {path.stem: path for path in open_clip_file("model_configs").glob("*.json")}


def open_clip_architecture(name: str) -> dict[str, Any]:
    """open_clip's model configuration `name`; "-quickgelu" after any name selects OpenAI's activation. Raises
    UsageError with similar names."""
    known, plain = _architectures(), name.removesuffix("-quickgelu")
    if name not in known and plain not in known:
        near = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
        raise UsageError(f"architecture {name!r} is not one of OpenCLIP's; near: {', '.join(near)}")
    record = json.loads(known.get(name, known.get(plain)).read_text(encoding="utf-8"))
    return record | {"quick_gelu": True} if name != plain else record
