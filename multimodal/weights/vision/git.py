"""GIT in the names of transformers' GitForCausalLM (Wang et al. 2022).

Traps: the image tower is CLIP's, with quick-GELU and the first norm; the text blocks are BERT's. The norm of the
projection has the image tower's epsilon. Texts begin with [CLS] and end with [SEP]."""

from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.vision.git import GIT, GITConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NameRow, Tensors, repeat, under, weight_and_bias
from multimodal.weights.text import bert
from multimodal.weights.vision.clip_hf import OWN, VISION, part, vision_part, vision_rows
from multimodal.weights.vision.image_processor import preprocessing

# defaults of GitConfig and GitVisionConfig
TEXT = {
    "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6,
    "num_attention_heads": 12, "max_position_embeddings": 1024, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "bos_token_id": 101, "eos_token_id": 102, "num_image_with_embedding": None,
}  # fmt: skip
EMBEDDING, HEAD = "git.embeddings.word_embeddings.weight", "output"


def config_from(config: dict[str, Any], tensors: Tensors) -> GITConfig:
    """Raises CheckpointError for a video model."""
    if (frames := config["num_image_with_embedding"]) is not None:
        raise CheckpointError(f"config.json: num_image_with_embedding {frames} (video) is not supported")
    tied = bert.same(tensors, f"{HEAD}.weight", EMBEDDING, absent=config.get("tie_word_embeddings", False))
    vision = part(config, "vision", VISION | {"patch_size": 16})
    return GITConfig(vision_part(vision, "token", **OWN), bert.decoder_config(config, tied, transform=False))


def rows(config: GITConfig) -> list[NameRow]:
    tied = [NameRow(f"{HEAD}.bias", "decoder.tied_bias"), repeat(f"{HEAD}.weight", EMBEDDING)]
    return [
        *under("git.image_encoder.vision_model.", "image.", vision_rows()),
        *weight_and_bias("git.visual_projection.visual_projection.0", "project"),
        *weight_and_bias("git.visual_projection.visual_projection.1", "project_norm"),
        *bert.tower_rows("git.", "decoder."),
        *(tied if config.decoder.tied else weight_and_bias(HEAD, "decoder.head")),
    ]


def tokenizer(folder: Path | None, text: dict[str, Any]) -> Tokenizer | None:
    return bert.tokenizer(
        folder, text["vocab_size"], text["bos_token_id"], text["eos_token_id"], text["max_position_embeddings"]
    )


FAMILY = Family(
    "git", GIT, (EMBEDDING, "git.visual_projection.visual_projection.0.weight"), config_from, rows, tokenizer,
    preprocessing, needs="config.json", defaults=TEXT, one_size=True,
)  # fmt: skip
