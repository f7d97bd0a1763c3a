"""LLaVA 1.5 (Liu et al. 2023) and LLaVA-OneVision (Li et al. 2024) in transformers' names.

Traps: the image's state is that after a block, without the tower's last norm, which the files hold. transformers 5
leaves `vision_model.` out of the tower's names. Sizes of the decoder that are its configuration's defaults are not in
the files."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from multimodal.blocks.connector import ConnectorConfig
from multimodal.errors import CheckpointError
from multimodal.models.any_to_text import AnyToText, AnyToTextConfig
from multimodal.models.vit import ViTConfig
from multimodal.system.files import shown
from multimodal.tokens.image.preprocessing import Preprocessing, Tiling
from multimodal.weights.any.chat import chat_format
from multimodal.weights.any.parts import decoder_config, decoder_rows, decoder_tokenizer, perceptron_rows
from multimodal.weights.family import Family, activation
from multimodal.weights.table import NameRow, Tensors, under
from multimodal.weights.vision import clip_hf, image_processor, siglip

TOWERS = ("vision_tower.vision_model.", "vision_tower.")  # transformers 4 and 5
OLD, NEW = "language_model.model.embed_tokens.weight", "embeddings.patch_embedding.weight"
ONE_VISION = {"image_token_index": 151646, "video_token_index": 151647, "vision_feature_layer": -1,
              "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}  # fmt: skip
VIDEO = "LlavaOnevisionVideoProcessor"
MARKERS = {"image": "<image>", "video": "<video>"}
LLAVA = {"image_token_index": 32000, "vision_feature_layer": -2, "vision_feature_select_strategy": "default"}


def tower(config: dict[str, Any]) -> ViTConfig:
    """CLIP's or SigLIP's image tower. Raises CheckpointError for another one, and for SigLIP's pooling head."""
    vision = config.get("vision_config") or {}
    if (kind := vision.get("model_type")) == "clip_vision_model":
        return clip_hf.vision_part(clip_hf.VISION | vision, "none", **clip_hf.OWN)
    if kind != "siglip_vision_model":
        raise CheckpointError(f"config.json: vision_config of kind {kind!r} is not supported")
    vision = siglip.VISION | vision
    if vision["vision_use_head"]:
        raise CheckpointError("config.json: vision_use_head True is not supported")
    return clip_hf.vision_part(vision, "none", class_token=False)


def tower_rows(image: ViTConfig) -> list[NameRow]:
    if image.class_token:
        return clip_hf.vision_rows()
    return clip_hf.plain_vision_rows()


def layers_of(layer: Any, image: ViTConfig) -> int:
    """Blocks up to the state `vision_feature_layer`. Raises CheckpointError."""
    layers = image.stack.layers
    if not isinstance(layer, int) or not -layers - 1 <= layer <= layers:
        raise CheckpointError(f"config.json: vision_feature_layer {layer!r} is not supported")
    if not (count := layer if layer >= 0 else layers + 1 + layer):
        raise CheckpointError("config.json: vision_feature_layer before the first block is not supported")
    return count


def config_from(config: dict[str, Any], tensors: Tensors, several: bool) -> AnyToTextConfig:
    """`several`: LLaVA-OneVision, with tiles, several images and videos."""
    config = {"projector_hidden_act": "gelu"} | (ONE_VISION if several else LLAVA) | config
    image, decoder = tower(config), decoder_config(config, tensors, "qwen2" if several else "llama")
    select = config["vision_feature_select_strategy"]
    known = ["default"] * image.class_token + ["full"] * (not image.class_token or not several)  # tiles are squares
    if select not in known:
        raise CheckpointError(f"config.json: vision_feature_select_strategy {select!r} is not supported")
    kinds = ("image", "video") if several else ("image",)
    ids = tuple(config.get(f"{kind}_token_id", config[f"{kind}_token_index"]) for kind in kinds)
    connector = ConnectorConfig(
        image.width, decoder.width, hidden=decoder.width, activation=activation(config, "projector_hidden_act"),
        bias=config.get("multimodal_projector_bias", True),
    )  # fmt: skip
    return AnyToTextConfig(
        decoder, ids, image, connector, layers_of(config["vision_feature_layer"], image),
        image_prefix=select == "full" and image.class_token, image_newline=several,
    )  # fmt: skip


def rows(config: AnyToTextConfig, place: str) -> list[NameRow]:
    """`place`: prefix of the image tower."""
    return [
        *under(place, "image.", tower_rows(config.image)),
        *perceptron_rows("multi_modal_projector.", "image_connector.", config.image_connector.bias),
        *([NameRow("image_newline", "newline")] if config.image_newline else []),
        *decoder_rows(config.decoder),
    ]


def preprocessing(folder: Path | None, config: dict[str, Any], several: bool) -> Preprocessing | None:
    """Preprocessing of the folder. Raises CheckpointError for unknown steps."""
    if (found := image_processor.image_record(folder)) is None:
        return None
    path, record = found
    if not several:
        return image_processor.preprocessing_of(path, record, "Llava")
    pins = record.get("image_grid_pinpoints") or config.get("image_grid_pinpoints")
    kind = (ONE_VISION | config)["vision_aspect_ratio"]
    if not pins or not kind.startswith("anyres_max_"):
        raise CheckpointError(f"{path}: expected image_grid_pinpoints and anyres_max_N (got {pins!r:.40}, {kind!r})")
    made = image_processor.preprocessing_of(path, record, "LlavaOnevision")
    tiling = Tiling("fit", tuple((height, width) for height, width in pins), int(kind.removeprefix("anyres_max_")))
    if (video := image_processor.video_record(folder)) is not None:
        own = _of_videos(*video, made)
        tiling = replace(tiling, video=None if own == made else (own.mean, own.std))
    return made.replace(tiling=tiling)


def _of_videos(path: Path, record: dict[str, Any], image: Preprocessing) -> Preprocessing:
    """Preprocessing of frames. Older records name an image processor. Raises CheckpointError for other steps than those
    of images."""
    name = record.get("video_processor_type") or record.get("image_processor_type") or VIDEO
    if name not in (VIDEO, "LlavaOnevisionImageProcessor"):
        raise CheckpointError(f"{path}: video processor {shown(name)} is not supported")
    own = image_processor.preprocessing_of(path, record | {"image_processor_type": None}, "LlavaOnevision")
    known = image.replace(mean=own.mean, std=own.std)
    if own != known:
        other = ", ".join(f"{key} {shown(value)}" for key, value in vars(own).items() if value != getattr(known, key))
        raise CheckpointError(f"{path}: videos in other steps than images are not supported ({other})")
    return own


def _family(name: str, several: bool, place: str) -> Family:
    newline, markers = ("image_newline",), MARKERS if several else {"image": MARKERS["image"]}
    return Family(
        name, AnyToText,
        (OLD, f"{place}{NEW}", "multi_modal_projector.linear_1.weight", *(newline if several else ())),
        partial(config_from, several=several), partial(rows, place=place),
        lambda folder, config: decoder_tokenizer(folder, config, "qwen2" if several else "llama", markers),
        partial(preprocessing, several=several), needs="config.json", lacks=() if several else newline,
        types=("llava_onevision",) if several else ("llava",), one_size=True,
        chat=partial(chat_format, **markers),
    )  # fmt: skip


LLAVA_4, LLAVA_5 = (_family(name, False, place) for name, place in zip(("llava", "llava-5"), TOWERS, strict=True))
ONE_VISION_4, ONE_VISION_5 = (
    _family(name, True, place) for name, place in zip(("llava-onevision", "llava-onevision-5"), TOWERS, strict=True)
)
