"""SigLIP (Zhai et al. 2023) and SigLIP 2 in transformers' names.

Traps: attention pools the image (map pooling), with no projection after it. Text attends in both directions without a
padding mask and is pooled at its last position, so it must be padded to 64 as in training. Epsilon is 1e-6 and GELU its
tanh form."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.text_config import TextConfig
from multimodal.system.files import optional_json, shown
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.hub.files import siglip2_tokenizer
from multimodal.tokens.text.sentencepiece import SigLIPText
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import SCALAR, NameRow, Op, Tensors, in_proj, linears, under, weight_and_bias
from multimodal.weights.vision import clip_hf, image_processor

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
    path, record = image_processor.image_record(folder) or (None, None)
    if record is None:
        return None
    side, patch = record.get("max_num_patches", 256) ** 0.5, record.get("patch_size", 16)
    if (name := image_processor.class_of(record, "Siglip2")) != "Siglip2":
        raise CheckpointError(f"{path}: expected image processor 'Siglip2' (got {shown(name)})")
    own = {"size": {"height": round(side) * patch, "width": round(side) * patch}, "do_center_crop": False}
    if round(side) ** 2 != record.get("max_num_patches", 256):
        raise CheckpointError(f"{path}: max_num_patches {record['max_num_patches']} is not a square")
    return image_processor.preprocessing_of(path, record | own | {"image_processor_type": "ViT"}, "ViT")


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


FAMILY = Family(
    "siglip-hf", CLIP, ("vision_model.head.probe", "logit_bias"), hf_config, hf_rows, hf_tokenizer,
    partial(image_processor.preprocessing, processor="Siglip"), needs="config.json", types=("", "siglip"),
    one_size=True,
)  # fmt: skip
NAFLEX = replace(
    FAMILY,
    name="siglip2-hf",
    config_from=naflex_config,
    rows=naflex_rows,
    preprocessing=naflex_preprocessing,
    types=("siglip2",),
    one_size=False,
)
