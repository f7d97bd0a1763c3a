"""GIT in the names of transformers' GitForCausalLM (Wang et al. 2022).

Traps: the picture tower is CLIP's, with its quick-GELU and first norm; the text's blocks are BERT's. The projection's
norm has the picture tower's epsilon. Texts begin with [CLS] and end with [SEP]."""

from functools import partial
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.git import GIT, GITConfig
from multimodal.tokens.text.vocabulary import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import FIRST, Row, Tensors, under, weight_and_bias
from multimodal.weights.text import bert
from multimodal.weights.vision.clip_hf import VISION, part, preprocessing, tower_rows, vision_part

# GitConfig's and GitVisionConfig's own defaults
TEXT = {
    "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6,
    "num_attention_heads": 12, "max_position_embeddings": 1024, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "bos_token_id": 101, "eos_token_id": 102, "num_image_with_embedding": None,
}  # fmt: skip
EMBEDDING, HEAD = "git.embeddings.word_embeddings.weight", "output"


def config_from(config: dict[str, Any], tensors: Tensors) -> GITConfig:
    """Raises CheckpointError for a model of videos."""
    if not config:
        raise CheckpointError("GIT weights without config.json, which has the number of heads")
    text = TEXT | config
    if (frames := text["num_image_with_embedding"]) is not None:
        raise CheckpointError(f"config.json: num_image_with_embedding {frames} (a model of videos) is not supported")
    tied = bert.same(tensors, f"{HEAD}.weight", EMBEDDING, absent=config.get("tie_word_embeddings", False))
    vision = part(config, "vision", VISION | {"patch_size": 16})
    return GITConfig(vision_part(vision, "token"), bert.decoder_config(text, tied, transform=False))


def rows(config: GITConfig) -> list[Row]:
    vision = [
        *tower_rows("post_layernorm"),
        Row("embeddings.class_embedding", "class_token", FIRST),
        Row("embeddings.patch_embedding.weight", "embed.weight"),
        *weight_and_bias("pre_layrnorm", "stem_norm"),
    ]
    tied = [Row(f"{HEAD}.bias", "decoder.tied_bias"), bert.again(f"{HEAD}.weight", EMBEDDING)]
    return [
        *under("git.image_encoder.vision_model.", "image.", vision),
        *weight_and_bias("git.visual_projection.visual_projection.0", "project"),
        *weight_and_bias("git.visual_projection.visual_projection.1", "project_norm"),
        *bert.tower_rows("git.", "decoder."),
        *(tied if config.decoder.tied else weight_and_bias(HEAD, "decoder.head")),
    ]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    text = TEXT | config
    return bert.tokenizer(
        folder, text["vocab_size"], text["bos_token_id"], text["eos_token_id"], text["max_position_embeddings"]
    )


FAMILY = Family(
    "git", GIT,
    recognises=lambda tensors, config: {EMBEDDING, "git.visual_projection.visual_projection.0.weight"} <= set(tensors),
    config_from=config_from, rows=rows, tokenizer=tokenizer, preprocessing=partial(preprocessing, crops=True),
)  # fmt: skip
