"""SigLIP (Zhai et al. 2023) and SigLIP 2 at fixed resolutions in transformers' names, and OpenCLIP's image towers on a
timm trunk.

Traps: attention pools the image (map pooling), with no projection after it. Text attends in both directions without a
padding mask and is pooled at its last position, so it must be padded to 64 as in training. Epsilon is 1e-6 and GELU its
tanh form; OpenCLIP's first SigLIPs have the exact GELU."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.text_config import TextConfig
from multimodal.system.files import optional_json
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.hub.files import siglip2_tokenizer
from multimodal.tokens.text.sentencepiece import SigLIPText
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import SCALAR, NameRow, Op, Tensors, in_proj, linears, under, weight_and_bias
from multimodal.weights.vision import clip_hf, clip_openai, vit_timm
from multimodal.weights.vision.open_clip import (
    TRUNK,
    model_settings,
    open_clip_preprocessing,
    open_clip_tokenizer,
    pair,
    settings,
    text_part,
)
from multimodal.weights.vision.timm_model import plain, timm_model, vit_config

# defaults of SiglipTextConfig and SiglipVisionConfig
COMMON = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
          "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}  # fmt: skip
TEXT = COMMON | {"vocab_size": 32000, "max_position_embeddings": 64}
SIGLIP2 = ("GemmaTokenizer", "GemmaTokenizerFast", "Siglip2Tokenizer")
VISION = COMMON | {"num_channels": 3, "image_size": 224, "patch_size": 16, "vision_use_head": True}


def hf_config(config: dict[str, Any], tensors: Tensors) -> CLIPConfig:
    text, vision = clip_hf.part(config, "text", TEXT), clip_hf.part(config, "vision", VISION)
    if not vision["vision_use_head"]:
        raise CheckpointError("config.json: vision_use_head False is not supported")
    embed = text.get("projection_size") or text["hidden_size"]
    if embed != vision["hidden_size"]:
        raise CheckpointError(f"config.json: text width {embed} must equal the image width {vision['hidden_size']}")
    tower = TextConfig(text["vocab_size"], text["max_position_embeddings"], clip_hf.stack(text), causal=False)
    image = clip_hf.vision_part(vision, "map", class_token=False)
    return CLIPConfig(image, tower, embed, "sigmoid", "last", image_project=False, text_bias=True)


def naflex_config(config: dict[str, Any], tensors: Tensors) -> CLIPConfig:
    """SigLIP 2 for images of their own aspect: positions of a square of patches, resampled to each image's grid."""
    vision = clip_hf.part(config, "vision", {"num_patches": 256, "patch_size": 16})
    side = round(vision["num_patches"] ** 0.5)
    if side**2 != vision["num_patches"]:
        raise CheckpointError(f"config.json: num_patches {vision['num_patches']} is not a square")
    made = hf_config(config | {"vision_config": vision | {"image_size": side * vision["patch_size"]}}, tensors)
    return replace(made, image=replace(made.image, position_mode="bilinear"))


def naflex_preprocessing(folder: Path | None, config: dict[str, Any]) -> Preprocessing | None:
    """A square of the most patches; images at their own aspect get as many."""
    path, record = (clip_hf.image_record(folder) if folder else None) or (None, None)
    if record is None:
        return None
    side, patch = record.get("max_num_patches", 256) ** 0.5, record.get("patch_size", 16)
    own = {"size": {"height": round(side) * patch, "width": round(side) * patch}, "do_center_crop": False}
    if round(side) ** 2 != record.get("max_num_patches", 256):
        raise CheckpointError(f"{path}: max_num_patches {record['max_num_patches']} is not a square")
    return clip_hf.preprocessing_of(path, record | own, resample=2)


def naflex_rows(config: CLIPConfig) -> list[NameRow]:
    patch, name = config.image.patch, "vision_model.embeddings.patch_embedding.weight"
    convolution = Op(  # of patches as (row, column, channel)
        lambda t: [t.unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2)],
        lambda ours: ours[0].permute(0, 2, 3, 1).flatten(1),
    )
    return [replace(row, op=convolution) if row.foreign == name else row for row in hf_rows(config)]


def hf_rows(config: CLIPConfig) -> list[NameRow]:
    names = {"attention.out_proj": "attention.out", "layernorm": "norm", "mlp.fc1": "feed.up", "mlp.fc2": "feed.down"}
    pool = [NameRow("probe", "query"), *in_proj("attention", "attention"), *linears(names)]
    vision = [
        *clip_hf.tower_rows("post_layernorm"),
        *weight_and_bias("embeddings.patch_embedding", "embed"),
        *under("head.", "pool.", pool),
    ]
    return [
        *clip_hf.text_rows(), *weight_and_bias("text_model.head", "text_project"),
        *under("vision_model.", "image.", vision),
        NameRow("logit_scale", "logit_scale", SCALAR), NameRow("logit_bias", "logit_bias", SCALAR),
    ]  # fmt: skip


def hf_tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """SigLIP's SentencePiece file, or SigLIP 2's `tokenizer.json`; the multilingual SigLIP has another."""
    text = clip_hf.part(config, "text", TEXT)
    if folder is not None and optional_json(folder / RECORD).get("tokenizer_class") in SIGLIP2:
        return siglip2_tokenizer(folder, text["vocab_size"], text["max_position_embeddings"])
    if folder is None or not (folder / "spiece.model").exists() or text["vocab_size"] != 32000:
        return None
    return SigLIPText(folder / "spiece.model", text["max_position_embeddings"])


def trunk_config(config: dict[str, Any], tensors: Tensors) -> CLIPConfig:
    """OpenCLIP's TimmModel (open_clip/timm_model.py). Raises CheckpointError unless the trunk is a plain ViT."""
    model = model_settings(config)
    vision = settings(model["vision_cfg"], TRUNK, "vision_cfg.")
    name, pool, projection = vision["timm_model_name"], vision["timm_pool"], vision["timm_proj"]
    if not name or projection not in ("linear", "none", "", None) or vision["timm_proj_bias"]:
        raise CheckpointError(
            f"OpenCLIP configuration: timm_model_name {name!r} with timm_proj {projection!r} (bias "
            f"{vision['timm_proj_bias']}) is not supported"
        )
    if projection == "linear":  # OpenCLIP removes the head of a finished model, so the norm keeps its place
        trunk = timm_model(name)
        trunk.reset_classifier(0, **({"global_pool": pool} if pool else {}))
        plain(trunk, name)
    else:
        classes = 0 if projection == "none" else model["embed_dim"]
        trunk = timm_model(name, num_classes=classes, global_pool=pool)
    image = vit_config(trunk)
    if image.image != pair(vision["image_size"]):
        raise CheckpointError(f"OpenCLIP configuration: image_size {vision['image_size']}, {name} has {image.image}")
    text, fields = text_part(model)
    loss = "softmax" if model["init_logit_bias"] is None else "sigmoid"
    return CLIPConfig(image, text, model["embed_dim"], loss, image_project=projection == "linear", **fields)


def trunk_rows(prefix: str, layout: vit_timm.TimmNames, config: CLIPConfig) -> list[NameRow]:
    project = [NameRow("visual.head.proj.weight", "image_project.weight")] if config.image_project else []
    trunk = under("visual.trunk.", "image.", vit_timm.rows(config.image, layout))
    return [*trunk, *project, *clip_openai.text_rows(config, prefix)]


def _trunks(name: str, prefix: str) -> tuple[Family, ...]:
    return tuple(
        Family(
            f"{name}{kind}", CLIP, ("visual.trunk.patch_embed.proj.weight", f"{prefix}token_embedding.weight"),
            trunk_config, partial(trunk_rows, prefix, layout), open_clip_tokenizer, open_clip_preprocessing,
            only=partial(layout.fits, prefix="visual.trunk."),
        )
        for kind, layout in vit_timm.LAYOUTS.items()
    )  # fmt: skip


FAMILY = Family(
    "siglip-hf", CLIP, ("vision_model.head.probe", "logit_bias"), hf_config, hf_rows, hf_tokenizer,
    partial(clip_hf.preprocessing, crops=False), needs="config.json", types=("", "siglip"),
)  # fmt: skip
NAFLEX = replace(
    FAMILY,
    name="siglip2-hf",
    config_from=naflex_config,
    rows=naflex_rows,
    preprocessing=naflex_preprocessing,
    types=("siglip2",),
)
TRUNK_FAMILIES = _trunks("open_clip-timm", "text.")
TRUNK_FLAT_FAMILIES = _trunks("open_clip-timm-flat", "")
TRUNK_FAMILY, TRUNK_FLAT = TRUNK_FAMILIES[0], TRUNK_FLAT_FAMILIES[0]
