"""Moonshine in Hugging Face's names.

Traps: RoPE turns the first 9 tenths of a head, in pairs of neighbours; the decoder's first map holds values, then
gates."""

from pathlib import Path
from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.stack import BlockConfig, StackConfig
from multimodal.errors import CheckpointError
from multimodal.models.speech.moonshine import Moonshine, MoonshineConfig, MoonshineEncoderConfig
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.hub.files import hub_tokenizer
from multimodal.tokens.text.tokenizer import Tokenizer
from multimodal.weights.family import Family
from multimodal.weights.table import HALVES, NameRow, Tensors, linears, repeat, under, weight_and_bias

ONLY = {"attention_bias": False, "encoder_hidden_act": "gelu", "decoder_hidden_act": "silu"}
PREPROCESSOR = "preprocessor_config.json"
SAMPLES = {"do_normalize": False, "sampling_rate": 16000}
EMBEDDING, HEAD = "model.decoder.embed_tokens.weight", "proj_out.weight"


def _positions(config: dict[str, Any], heads: int) -> PositionConfig:
    rope = config.get("rope_parameters") or config
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"moonshine config: rope_type must be default (got {rope['rope_type']!r})")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.9))
    return PositionConfig(
        "rotary", theta=float(rope.get("rope_theta", 10000.0)), interleaved=True,
        share=int(config["hidden_size"] // heads * share),
    )  # fmt: skip


def _stack(config: dict[str, Any], part: str) -> StackConfig:
    width, heads = config["hidden_size"], config[f"{part}_num_attention_heads"]
    shared = config.get(f"{part}_num_key_value_heads") or heads
    if shared != heads:
        raise CheckpointError(f"moonshine config: {part}_num_key_value_heads {shared} is not {heads}, the heads")
    attention, decodes = AttentionConfig(width, heads, bias=False), part == "decoder"
    block = BlockConfig(
        attention, config["intermediate_size"], config[f"{part}_hidden_act"], gated=decodes, norm="layer_unbiased",
        cross=attention if decodes else None, feed_bias=True,
    )  # fmt: skip
    return StackConfig(block, config[f"{part}_num_hidden_layers"])


def _config(config: dict[str, Any], tensors: Tensors) -> MoonshineConfig:
    for stated, only in ((config, ONLY), (config.get(PREPROCESSOR, {}), SAMPLES)):
        for key, value in only.items():
            if stated.get(key, value) != value:
                raise CheckpointError(f"moonshine config: {key} must be {value!r} (got {stated[key]!r})")
    encoder, decoder = (_stack(config, part) for part in ("encoder", "decoder"))
    places = [_positions(config, stack.block.attention.heads) for stack in (encoder, decoder)]
    text = TextConfig(
        config["vocab_size"], config["max_position_embeddings"], decoder, causal=True,
        tied=config.get("tie_word_embeddings", True), positions=places[1],
    )  # fmt: skip
    start, end = config["decoder_start_token_id"], config["eos_token_id"]
    end = end[0] if isinstance(end, list) else end  # the card has the others
    return MoonshineConfig(MoonshineEncoderConfig(encoder, places[0]), text, start, end)


def _block(cross: bool) -> list[NameRow]:
    parts = {"self_attn": "attention"} | ({"encoder_attn": "cross"} if cross else {})
    rows = [NameRow(f"{part}.{way}_proj.weight", f"{own}.{ours}.weight") for part, own in parts.items()
            for way, ours in {"q": "query", "k": "key", "v": "value", "o": "out"}.items()]  # fmt: skip
    norms = ["attention_branch", *(["cross_branch"] if cross else []), "feed_branch"]
    names = ["input_layernorm", "post_attention_layernorm", "final_layernorm"]
    up = ("feed.up", "feed.gate") if cross else "feed.up"
    return [
        *rows,
        *(NameRow(f"{theirs}.weight", f"{own}.norm.weight") for theirs, own in zip(names, norms, strict=False)),
        *(weight_and_bias("mlp.fc1", up, HALVES) if cross else weight_and_bias("mlp.fc1", up)),
        *weight_and_bias("mlp.fc2", "feed.down"),
    ]


def _rows(config: MoonshineConfig) -> list[NameRow]:
    head = repeat(HEAD, EMBEDDING) if config.decoder.tied else NameRow(HEAD, "decoder.head.weight")
    return [
        NameRow("model.encoder.conv1.weight", "encoder.first.weight"),
        *under("model.encoder.", "encoder.", linears({"groupnorm": "norm", "conv2": "second", "conv3": "third"})),
        *under("model.encoder.layers.{}.", "encoder.stack.blocks.{}.", _block(cross=False)),
        NameRow("model.encoder.layer_norm.weight", "encoder.stack.norm.weight"),
        NameRow(EMBEDDING, "decoder.embed.weight"),
        *under("model.decoder.layers.{}.", "decoder.stack.blocks.{}.", _block(cross=True)),
        NameRow("model.decoder.norm.weight", "decoder.stack.norm.weight"),
        head,
    ]


def _tokenizer(folder: Path | None, config: dict[str, Any]) -> Tokenizer | None:
    return hub_tokenizer(folder, config)


MOONSHINE = Family(
    "moonshine", Moonshine, ("model.encoder.conv3.weight", EMBEDDING), _config, _rows, _tokenizer, needs="config.json",
    beside=PREPROCESSOR, defaults={"max_position_embeddings": 512, "decoder_start_token_id": 1, "eos_token_id": 2},
    types=("", "moonshine"),
)  # fmt: skip
