"""Idefics3 (Laurençon et al. 2024) and SmolVLM (Marafioti et al. 2025) in transformers' names.

Traps: positions of patches are found by fractions of a tile's side; a tile's patches merge by pixel shuffle before one
linear map; the decoder's own `tie_word_embeddings` is not read where the file has its head."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.blocks.connector import ConnectorConfig
from multimodal.errors import CheckpointError
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.system.files import shown
from multimodal.tokens.image.preprocessing import Preprocessing, Tiling
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.any.chat import chat_format
from multimodal.weights.any.parts import Names, decoder_config, decoder_rows, decoder_tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, under
from multimodal.weights.vision import clip_hf, image_processor

# defaults of Idefics3VisionConfig and SmolVLMVisionConfig
VISION = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
          "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "gelu_pytorch_tanh",
          "layer_norm_eps": 1e-6}  # fmt: skip
DEFAULTS = {"image_token_id": 128257, "scale_factor": 2}
MARKERS = {"image": "<image>"}
NAMES = Names("model.text_model.", "lm_head.weight")
CONNECTOR = "model.connector.modality_projection.proj.weight"
STEPS = image_processor.COMMON | {"resample": 1, "do_image_splitting": True, "size": {"longest_edge": 4 * 364},
                                  "max_image_size": {"longest_edge": 364}}  # fmt: skip


def config_from(config: dict[str, Any], tensors: Tensors) -> AnyToTextConfig:
    text = dict(config.get("text_config") or {"rms_norm_eps": 1e-5})  # else LlamaConfig's own default
    text |= {"tie_word_embeddings": False} if NAMES.head in tensors else {}
    decoder = decoder_config(config | {"text_config": text}, tensors, "llama", NAMES)
    image = clip_hf.vision_part(VISION | (config.get("vision_config") or {}), "none", class_token=False)
    connector = ConnectorConfig(image.width, decoder.width, shuffle=config["scale_factor"], bias=False)
    return AnyToTextConfig(decoder, (config["image_token_id"],), replace(image, position_mode="bucket"), connector)


def rows(config: AnyToTextConfig) -> list[NameRow]:
    return [
        *under("model.vision_model.", "image.", clip_hf.plain_vision_rows()),
        NameRow(CONNECTOR, "image_connector.out.weight"), *decoder_rows(config.decoder, NAMES),
    ]  # fmt: skip


def preprocessing(folder: Path | None, config: dict[str, Any]) -> Preprocessing | None:
    """Preprocessing of the folder. Raises CheckpointError for unknown steps."""
    if (found := image_processor.image_record(folder)) is None:
        return None
    path, steps = found[0], STEPS | found[1]
    if (name := image_processor.class_of(steps, "Idefics3")) not in ("Idefics3", "SmolVLM"):
        raise CheckpointError(f"{path}: image processor {shown(name)} is not supported")
    image_processor.check_steps(path, steps)
    longest, tile = steps["size"].get("longest_edge"), steps["max_image_size"]["longest_edge"]
    if not longest:
        raise CheckpointError(f"{path}: size {shown(steps['size'])} is not supported (expected a longest edge)")
    mean, std = (tuple(map(float, steps[f"image_{name}"])) for name in ("mean", "std"))
    tiling = Tiling("split" if steps["do_image_splitting"] else "whole", longest=longest)
    interpolation = image_processor.RESAMPLE[steps["resample"]]
    return Preprocessing((tile, tile), "squash", interpolation, mean, std, 0, 1.0, tiling=tiling)


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return decoder_tokenizer(folder, config, "llama", MARKERS)


FAMILY = Family(
    "idefics3", AnyToText, (CONNECTOR, "model.text_model.embed_tokens.weight"), config_from, rows, tokenizer,
    preprocessing, needs="config.json", defaults=DEFAULTS, types=("idefics3", "smolvlm"),
    chat=partial(chat_format, **MARKERS),
)  # fmt: skip
