"""BLIP captioners in the names of transformers' BlipForConditionalGeneration (Li et al. 2022).

Traps: texts begin with `text_config.bos_token_id` ([DEC]), past BERT's vocabulary, and end with its `sep_token_id`, not
its `eos_token_id`. The bias of the logits has two names; their map is the embedding."""

from functools import partial
from pathlib import Path
from typing import Any

from multimodal.errors import CheckpointError
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import NO_FIRST, THIRDS, NameRow, Tensors, linears, qkv, under, weight_and_bias
from multimodal.weights.text import bert
from multimodal.weights.vision.clip_hf import part, vision_part
from multimodal.weights.vision.image_processor import preprocessing

# defaults of BlipTextConfig and BlipVisionConfig
TEXT = {
    "vocab_size": 30524, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 8, "max_position_embeddings": 512, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "bos_token_id": 30522, "sep_token_id": 102, "is_decoder": True,
}  # fmt: skip
VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 384, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "num_channels": 3,
}  # fmt: skip
EMBEDDING, PART = "text_decoder.bert.embeddings.word_embeddings.weight", "text_decoder.cls.predictions"
HEAD = bert.Head(f"{PART}.transform.dense", f"{PART}.transform.LayerNorm", f"{PART}.decoder", f"{PART}.bias")


def config_from(config: dict[str, Any], tensors: Tensors) -> VisionEncoderDecoderConfig:
    text, vision = part(config, "text", TEXT), part(config, "vision", VISION)
    if any(name.startswith("text_encoder.") for name in tensors):
        raise CheckpointError("BLIP for questions (BlipForQuestionAnswering) is not supported; its captioner is")
    if not text["is_decoder"]:
        raise CheckpointError("config.json: is_decoder must be true in a captioner")
    ties = {"tie_word_embeddings": any(one.get("tie_word_embeddings", True) for one in (config, text))}
    if (tied := HEAD.tied(tensors, EMBEDDING, ties)) is None:
        raise CheckpointError(f"tensor '{HEAD.dense}.weight' is missing")
    decoder = bert.decoder_config(text, tied, transform=True, source_width=vision["hidden_size"])
    return VisionEncoderDecoderConfig(vision_part(vision, "none", class_token=True), decoder)


def vision_rows() -> list[NameRow]:
    names = {
        "self_attn.projection": "attention.out", "layer_norm1": "attention_branch.norm",
        "layer_norm2": "feed_branch.norm", "mlp.fc1": "feed.up", "mlp.fc2": "feed.down",
    }  # fmt: skip
    block = [*weight_and_bias("self_attn.qkv", qkv("attention"), THIRDS), *linears(names)]
    return [
        NameRow("embeddings.class_embedding", "class_token", NO_FIRST),
        NameRow("embeddings.position_embedding", "positions", NO_FIRST),
        *weight_and_bias("embeddings.patch_embedding", "embed"),
        *weight_and_bias("post_layernorm", "stack.norm"),
        *under("encoder.layers.{}.", "stack.blocks.{}.", block),
    ]


def rows(config: VisionEncoderDecoderConfig) -> list[NameRow]:
    return [
        *under("vision_model.", "image.", vision_rows()),
        *bert.tower_rows("text_decoder.bert.", "decoder.", cross=True),
        *HEAD.rows(EMBEDDING, config.decoder, "decoder."),
    ]


def tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    text = part(config, "text", TEXT)
    return bert.tokenizer(
        folder, text["vocab_size"], text["bos_token_id"], text["sep_token_id"], text["max_position_embeddings"]
    )


FAMILY = Family(
    "blip", VisionEncoderDecoder, (EMBEDDING, "vision_model.embeddings.class_embedding"), config_from, rows, tokenizer,
    partial(preprocessing, processor="Blip"), needs="config.json", one_size=True,
)  # fmt: skip
