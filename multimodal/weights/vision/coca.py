"""CoCa in OpenCLIP's names (Yu et al. 2022; open_clip/coca_model.py and transformer.py).

Traps: the attention pooler's last norm is the image tower's `ln_post`, as wide as the shared space; its query, key and
value are fused if the tower has that width too. The class token of a text has the last row of the positions. A decoder
layer is two blocks there (`resblocks`, `cross_attn`), one here. Its feed-forward is always four times the width:
open_clip ignores its `mlp_ratio`."""

from dataclasses import replace
from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import StackConfig
from multimodal.errors import CheckpointError
from multimodal.models.coca import CoCa, CoCaConfig
from multimodal.weights.family import Family
from multimodal.weights.table import TRANSPOSE, NameRow, Op, Tensors, in_proj, joined, under, weight_and_bias
from multimodal.weights.vision.clip_openai import block_rows, text_rows, vision_part, vision_rows
from multimodal.weights.vision.open_clip import (
    MODEL,
    TEXT,
    model_settings,
    open_clip_preprocessing,
    open_clip_tokenizer,
    settings,
    text_part,
    tower,
)

POOL = {"attentional_pool": False, "attn_pooler_queries": 256, "attn_pooler_heads": 8}
CLASS = {"embed_cls": False}
DECODER = {"context_length": 77, "width": 512, "heads": 8, "layers": 12, "ls_init_value": None}
# keys of the decoder that open_clip ignores
UNREAD = ("mlp_ratio", "dim_head", "n_queries", "vocab_size")
LAST_APART = Op(lambda t: [t[:-1], t[-1]], lambda ours: joined([ours[0], ours[1][None]]))


def _split(record: dict[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of `own` with its defaults, and all others."""
    return {key: record.get(key, own[key]) for key in own}, {k: v for k, v in record.items() if k not in own}


def config_from(config: dict[str, Any], tensors: Tensors) -> CoCaConfig:
    """Raises CheckpointError for Hugging Face's text towers, those without a class token, and poolers with an extra
    query for the contrastive loss, whose vectors open_clip itself cannot compare."""
    model = model_settings(config, MODEL | {"multimodal_cfg": None})
    pool, vision = _split(model["vision_cfg"], POOL)
    text_class, text = _split(model["text_cfg"], CLASS)
    if text.get("hf_model_name"):
        raise CheckpointError(f"OpenCLIP configuration: text_cfg.hf_model_name {text['hf_model_name']!r} in a CoCa")
    if not isinstance(pool["attentional_pool"], bool) or not text_class["embed_cls"]:
        part = f"attentional_pool {pool['attentional_pool']!r} with embed_cls {text_class['embed_cls']}"
        raise CheckpointError(f"OpenCLIP configuration: {part} is not supported for CoCa")
    own = model | {"vision_cfg": vision, "text_cfg": text}
    image, (tower_of_text, fields) = vision_part(own), text_part(own)
    decoder = _decoder(own, tower_of_text.context)
    if not tower_of_text.causal:
        raise CheckpointError("OpenCLIP configuration: text_cfg.no_causal_mask is not supported for CoCa")
    if image.norm_after_pool:
        raise CheckpointError("OpenCLIP configuration: vision_cfg.final_ln_after_pool is not supported for CoCa")
    pooled = bool(pool["attentional_pool"])
    width = model["embed_dim"] if pooled else image.width
    if not decoder.block.attention.width == width == tower_of_text.width:
        raise CheckpointError(
            f"OpenCLIP configuration: image tokens {width}, text {tower_of_text.width} and multimodal_cfg "
            f"{decoder.block.attention.width} must have equal widths"
        )
    return CoCaConfig(
        replace(image, stack=replace(image.stack, final_norm=not pooled)),
        replace(tower_of_text, stack=replace(tower_of_text.stack, final_norm=False)),
        model["embed_dim"], "softmax" if model["init_logit_bias"] is None else "sigmoid",
        **fields | {"text_pool": "class"}, decoder=decoder, pad_id=text.get("pad_id", 0),
        queries=pool["attn_pooler_queries"] if pooled else 0, pool_heads=pool["attn_pooler_heads"],
    )  # fmt: skip


def _decoder(model: dict[str, Any], context: int) -> StackConfig:
    record = {key: value for key, value in model["multimodal_cfg"].items() if key not in UNREAD}
    part = settings(record, DECODER, "multimodal_cfg.")
    if part["context_length"] != context:
        raise CheckpointError(
            f"OpenCLIP configuration: context_length {context} in text_cfg, {part['context_length']} in multimodal_cfg"
        )
    stack = tower({**TEXT, **part}, part["heads"], bool(model["quick_gelu"]))
    cross = AttentionConfig(part["width"], part["heads"])
    return replace(stack, block=replace(stack.block, cross=cross, cross_block=True))


def pool_rows(fused: bool) -> list[NameRow]:
    """Rows of the attention pooler and the norm after it, from `visual.` to `image_pool.`."""
    weight, bias = in_proj("attn", "attention")
    apart = [NameRow(f"attn.{part}_proj_weight", own) for part, own in zip("qkv", weight.targets, strict=True)]
    rows = [
        NameRow("query", "query"),
        *([weight] if fused else apart), bias,
        *weight_and_bias("attn.out_proj", "attention.out"),
        *weight_and_bias("ln_q", "query_norm"), *weight_and_bias("ln_k", "source_norm"),
    ]  # fmt: skip
    return under("visual.", "image_pool.", [*under("attn_pool.", "", rows), *weight_and_bias("ln_post", "norm")])


def decoder_rows(layer_scale: bool) -> list[NameRow]:
    block = "decoder.blocks.{}."
    rows = [
        *block_rows(layer_scale, "resblocks.{}.", block, feed="own_feed"),
        *block_rows(layer_scale, "cross_attn.{}.", block, attention="cross"),
        *under("cross_attn.{}.", block, weight_and_bias("ln_1_kv", "source_norm")),
        *weight_and_bias("ln_final", "decoder.norm"),
        NameRow("text_projection", "words.weight", TRANSPOSE),
    ]
    return under("text_decoder.", "", rows)


def rows(config: CoCaConfig) -> list[NameRow]:
    vision = [row for row in vision_rows(config.image) if not config.queries or not row.foreign.startswith("ln_post")]
    other = ("text.positional_embedding", "text.ln_final.")
    text = [row for row in text_rows(config, "text.") if not row.foreign.startswith(other)]
    return [
        *under("visual.", "image.", vision),
        *(pool_rows(fused=config.embed == config.image.width) if config.queries else []),
        NameRow("visual.proj", "image_project.weight", TRANSPOSE),
        *text, *weight_and_bias("text.ln_final", "text_norm"),
        NameRow("text.positional_embedding", ("text.positions", "text_class_position"), LAST_APART),
        NameRow("text.cls_emb", "text_class"),
        *decoder_rows(config.decoder.block.layer_scale),
    ]  # fmt: skip


FAMILY = Family(
    "open_clip-coca", CoCa, ("text_decoder.text_projection",), config_from, rows, open_clip_tokenizer,
    open_clip_preprocessing,
)  # fmt: skip
