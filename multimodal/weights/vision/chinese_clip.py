"""Chinese-CLIP in the names of transformers' ChineseCLIPModel (Yang et al. 2022).

Traps: the image tower is CLIP's, the text tower BERT's, whose first token is projected; padding is masked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, under
from multimodal.weights.text import bert
from multimodal.weights.vision import clip_hf
from multimodal.weights.vision.image_processor import preprocessing

TEXT = "text_model."


def config_from(config: dict[str, Any], tensors: Tensors) -> CLIPConfig:
    text, vision = clip_hf.part(config, "text", bert.SIZES), clip_hf.part(config, "vision", clip_hf.VISION)
    tower = bert.decoder_config(text, None, transform=False)
    tower = replace(tower, causal=False, head_bias=False, segments=text["type_vocab_size"])
    image = clip_hf.vision_part(vision, "token", **clip_hf.OWN)
    return CLIPConfig(image, tower, config.get("projection_dim", 512), "softmax", "first", text_valid=True)


def rows(config: CLIPConfig) -> list[NameRow]:
    return [
        *bert.tower_rows(TEXT, "text.", segments=config.text.segments),
        *under("vision_model.", "image.", clip_hf.vision_rows()), *clip_hf.projection_rows(),
    ]  # fmt: skip


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return bert.encoder_tokenizer(folder, clip_hf.part(config, "text", bert.SIZES))


FAMILY = Family(
    "chinese-clip", CLIP, ("vision_model.pre_layrnorm.weight", TEXT + bert.WORD, "logit_scale"), config_from, rows,
    tokenizer, preprocessing, needs="config.json", types=("chinese_clip",), one_size=True,
)  # fmt: skip
