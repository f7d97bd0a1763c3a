"""Tiny random any-to-text models of transformers, under the names of their files."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.weights.any import audio, idefics3, llava
from multimodal.weights.family import Family
from tests.helpers.references.decoders import Case
from tests.helpers.references.vision import randomized

VOCABULARY, IMAGE, VIDEO = 61, 59, 60
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 4}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 7}  # fmt: skip
PINPOINTS = [[28, 28], [28, 56], [56, 28], [56, 56], [84, 28]]
BANDS, FRAMES = 8, 40
ENDS = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}


def file_names(tensors: dict[str, Tensor], tower: str = "") -> dict[str, Tensor]:
    """Tensors under the names that transformers writes. `tower`: what transformers 4 has after `vision_tower.`."""
    made = {}
    for name, tensor in tensors.items():
        name = name.replace("model.language_model.", "language_model.model.")
        name = name.replace("lm_head", "language_model.lm_head").removeprefix("model.")
        made[name.replace("vision_tower.", f"vision_tower.{tower}")] = tensor
    return made


def _case(family: Family, model: nn.Module, tower: str = "", plain: bool = False) -> Case:
    model = randomized(model)
    tensors = model.state_dict()
    return Case(family, model.config.to_dict(), model, tensors if plain else file_names(tensors, tower))


def llava_case(family: Family, tower: str = "", text: dict[str, Any] | None = None, **options: Any) -> Case:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    decoder = LlamaConfig(**TEXT | ENDS | (text or {}))
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION), text_config=decoder, image_token_index=IMAGE, **options
    )
    return _case(family, LlavaForConditionalGeneration(config), tower)


def one_vision_case(family: Family, tower: str = "", **options: Any) -> Case:
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**VISION, vision_use_head=False), text_config=Qwen2Config(**text | ENDS),
        image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=PINPOINTS, **options,
    )  # fmt: skip
    return _case(family, LlavaOnevisionForConditionalGeneration(config), tower)


def idefics_case(name: str, **options: Any) -> Case:
    import transformers

    text = {"model_type": "llama", **TEXT, **ENDS}
    made = getattr(transformers, f"{name}Config")(
        vision_config=VISION, text_config=text, image_token_id=IMAGE, scale_factor=2, **options
    )
    return _case(idefics3.FAMILY, getattr(transformers, f"{name}ForConditionalGeneration")(made), plain=True)


def qwen2_audio_case() -> Case:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    text = {key: value for key, value in TEXT.items() if key != "head_dim"} | ENDS
    encoder = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 40}
    sizes = {"num_mel_bins": BANDS, "max_source_positions": FRAMES // 2}
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **encoder, **sizes},
        text_config={"model_type": "qwen2", **text}, audio_token_index=IMAGE,
    )  # fmt: skip
    return _case(audio.QWEN2_AUDIO, Qwen2AudioForConditionalGeneration(config))


def voxtral_case() -> Case:
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    encoder = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes = {"num_mel_bins": BANDS, "max_source_positions": FRAMES // 2}
    config = VoxtralConfig(
        audio_config={"model_type": "voxtral_encoder", **encoder, **sizes},
        text_config={"model_type": "llama", **TEXT, **ENDS}, audio_token_id=IMAGE,
    )  # fmt: skip
    return _case(audio.VOXTRAL, VoxtralForConditionalGeneration(config))


CASES: dict[str, Callable[[], Case]] = {
    "LLaVA": lambda: llava_case(llava.LLAVA_5),
    "LLaVA, transformers 4, whole": lambda: llava_case(
        llava.LLAVA_4, "vision_model.", vision_feature_select_strategy="full", vision_feature_layer=2,
        multimodal_projector_bias=False,
    ),
    "LLaVA-OneVision": lambda: one_vision_case(llava.ONE_VISION_5, vision_aspect_ratio="anyres_max_1"),
    "LLaVA-OneVision, transformers 4": lambda: one_vision_case(llava.ONE_VISION_4, "vision_model."),
    "Idefics3": lambda: idefics_case("Idefics3"),
    "SmolVLM": lambda: idefics_case("SmolVLM"),
    "Qwen2-Audio": qwen2_audio_case,
    "Voxtral": voxtral_case,
}  # fmt: skip


@lru_cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    return CASES[name]()
