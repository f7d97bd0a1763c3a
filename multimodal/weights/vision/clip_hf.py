"""CLIP and MetaCLIP 2 in the names of transformers' CLIPModel and MetaClip2Model.

Traps: the image tower's first norm is spelt `pre_layrnorm`. Old files hold `position_ids`. An `eos_token_id` of 2 in
old configurations is a mistake and means the highest id of the vocabulary."""

from pathlib import Path
from typing import Any

from multimodal.blocks.stack import transformer
from multimodal.errors import CheckpointError
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.system.files import optional_json
from multimodal.tokens.text.clip import clip_tokenizer
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import RECORD, Tokenizer
from multimodal.weights.family import Family, activation
from multimodal.weights.table import FIRST, NameRow, Tensors, linears, under, weight_and_bias
from multimodal.weights.vision.image_processor import preprocessing
from multimodal.weights.vision.open_clip import pair

# defaults of CLIPTextConfig and CLIPVisionConfig
TEXT = {
    "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
METACLIP2 = "metaclip_2"  # whose eos is 2 indeed
OLDER = ("clip", METACLIP2, "chinese_clip")  # whose classes read `text_config_dict` and `vision_config_dict`
OWN = {"class_token": True, "patch_bias": False, "stem_norm": True}  # of CLIP's image tower, which GIT has too


def part(config: dict[str, Any], name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """`text_config` or `vision_config` with its defaults; `text_config_dict` takes precedence in CLIP's kinds alone."""
    older = config.get(f"{name}_config_dict") if config.get("model_type", "clip") in OLDER else None
    return defaults | (older or config.get(f"{name}_config") or {})


def stack(part: dict[str, Any]):
    """Blocks of one tower. Raises CheckpointError for an unknown activation."""
    return transformer(
        part["hidden_size"], part["num_hidden_layers"], part["num_attention_heads"], part["intermediate_size"],
        activation=activation(part, "hidden_act"), norm_eps=part["layer_norm_eps"],
    )  # fmt: skip


def vision_part(vision: dict[str, Any], pool: str, **parts: bool) -> ViTConfig:
    """`parts`: further fields of the tower. Raises CheckpointError for patches that are not square."""
    patch = pair(vision["patch_size"])
    if patch[0] != patch[1] or vision["num_channels"] != 3:
        raise CheckpointError(f"config.json: patch_size {patch} with {vision['num_channels']} channels")
    return ViTConfig(pair(vision["image_size"]), patch[0], stack(vision), pool, **parts)


def config_from(config: dict[str, Any], tensors: Tensors) -> CLIPConfig:
    text, vision = part(config, "text", TEXT), part(config, "vision", VISION)
    old = text["eos_token_id"] == 2 and config.get("model_type") != METACLIP2
    eos = text["vocab_size"] - 1 if old else text["eos_token_id"]
    if not isinstance(eos, int):
        raise CheckpointError(f"config.json: eos_token_id must be one id (got {eos!r})")
    tower = TextConfig(text["vocab_size"], text["max_position_embeddings"], stack(text), causal=True)
    return CLIPConfig(
        vision_part(vision, "token", **OWN), tower, config.get("projection_dim", 512), "softmax", "eos", eos
    )


def tower_rows(norm: str) -> list[NameRow]:
    """Rows of blocks, last norm and positions."""
    names = {
        "self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value", "self_attn.out_proj": "attention.out",
        "layer_norm1": "attention_branch.norm", "layer_norm2": "feed_branch.norm",
        "mlp.fc1": "feed.up", "mlp.fc2": "feed.down",
    }  # fmt: skip
    return [
        *under("encoder.layers.{}.", "stack.blocks.{}.", linears(names)),
        *weight_and_bias(norm, "stack.norm"),
        NameRow("embeddings.position_embedding.weight", "positions"),
        NameRow("embeddings.position_ids", reason="0, 1, 2, …", optional=True),
    ]


def plain_vision_rows() -> list[NameRow]:
    """Rows of an image tower without a class token."""
    return [*tower_rows("post_layernorm"), *weight_and_bias("embeddings.patch_embedding", "embed")]


def text_rows() -> list[NameRow]:
    rows = [*tower_rows("final_layer_norm"), NameRow("embeddings.token_embedding.weight", "embed.weight")]
    return under("text_model.", "text.", rows)


def vision_rows() -> list[NameRow]:
    return [
        *tower_rows("post_layernorm"),
        NameRow("embeddings.class_embedding", "class_token", FIRST),
        NameRow("embeddings.patch_embedding.weight", "embed.weight"),
        *weight_and_bias("pre_layrnorm", "stem_norm"),
    ]


def rows(config: CLIPConfig) -> list[NameRow]:
    return [*text_rows(), *under("vision_model.", "image.", vision_rows()), *projection_rows()]


def projection_rows() -> list[NameRow]:
    return [
        NameRow("visual_projection.weight", "image_project.weight"),
        NameRow("text_projection.weight", "text_project.weight"),
        NameRow("logit_scale", "logit_scale"),
    ]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    """CLIP's if tokenizer_config.json names it, else that of `tokenizer.json`."""
    text = part(config, "text", TEXT)
    kind = optional_json(folder / RECORD).get("tokenizer_class") if folder else None
    if folder is not None and kind in ("CLIPTokenizer", "CLIPTokenizerFast"):
        return clip_tokenizer(folder, text["vocab_size"], text["max_position_embeddings"])
    return hub_tokenizer(folder, text, context=text["max_position_embeddings"])


FAMILY = Family(
    "clip-hf", CLIP, ("vision_model.pre_layrnorm.weight", "logit_scale"), config_from, rows, tokenizer, preprocessing,
    needs="config.json", types=("", "clip", METACLIP2), one_size=True,
)  # fmt: skip
