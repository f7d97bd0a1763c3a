"""config.json of encoders, encoder-decoders, Whisper and image models, from our configuration."""

from typing import Any

from multimodal.blocks.stack import StackConfig
from multimodal.export.hf.decoders import ACTIVATIONS, body
from multimodal.models.clip import CLIPConfig
from multimodal.models.encoder_decoder import EncoderDecoderConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.models.whisper import WhisperConfig


def bert(c: TextConfig, kind: str) -> dict[str, Any]:
    made = body(c) | {"type_vocab_size": c.segments, "layer_norm_eps": c.stack.block.norm_eps,
                      "is_decoder": c.causal}  # fmt: skip
    if (first := c.positions.first) or kind in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        made |= {"pad_token_id": first - 1, "max_position_embeddings": c.context + first}
    if kind == "albert":
        stack, shared = c.stack, c.stack.shared
        made |= {"embedding_size": c.embed_width, "num_hidden_layers": stack.layers // (shared or 1),
                 "inner_group_num": shared or 1, "num_hidden_groups": 1 if shared else stack.layers}  # fmt: skip
    return made | ({"embedding_size": c.embed_width or c.width} if kind == "electra" else {})


def distilbert(c: TextConfig, kind: str) -> dict[str, Any]:
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
             "intermediate_size": "hidden_dim", "hidden_act": "activation"}  # fmt: skip
    return {names.get(name, name): value for name, value in body(c).items()}


def t5(c: EncoderDecoderConfig | TextConfig, kind: str) -> dict[str, Any]:
    tower = c if isinstance(c, TextConfig) else c.encoder
    block, own = tower.stack.block, tower.stack.block.attention
    plain = {"gelu_tanh": "gelu_new"}.get(block.activation, block.activation)
    feed = "gated-gelu" if block.gated and plain == "gelu_new" else ("gated-" if block.gated else "") + plain
    made = {
        "d_model": own.width, "d_kv": own.head_size, "d_ff": block.hidden,
        "num_layers": tower.stack.layers, "num_heads": own.heads, "layer_norm_epsilon": block.norm_eps,
        "relative_attention_num_buckets": tower.positions.buckets, "vocab_size": tower.vocabulary,
        "relative_attention_max_distance": tower.positions.furthest, "feed_forward_proj": feed,
        "dense_act_fn": plain, "is_gated_act": block.gated, "n_positions": tower.context,
    }  # fmt: skip
    if isinstance(c, TextConfig):
        return made
    scaled = c.decoder.logit_scale != 1
    return made | {
        "vocab_size": c.decoder.vocabulary, "num_decoder_layers": c.decoder.stack.layers,
        "decoder_start_token_id": c.start_id, "tie_word_embeddings": c.decoder.tied is True,
        "scale_decoder_outputs": scaled,
    }  # fmt: skip


def sides(c: Any) -> dict[str, Any]:
    """Sizes of an encoder and a decoder by BART's names."""
    made: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        stack = getattr(c, side).stack
        made |= {f"{side}_layers": stack.layers, f"{side}_attention_heads": stack.block.attention.heads,
                 f"{side}_ffn_dim": stack.block.hidden}  # fmt: skip
    block = c.decoder.stack.block
    return made | {"d_model": block.attention.width, "activation_function": ACTIVATIONS[block.activation],
                   "vocab_size": c.decoder.vocabulary, "tie_word_embeddings": c.decoder.tied is True}  # fmt: skip


def bart(c: EncoderDecoderConfig, kind: str) -> dict[str, Any]:
    made = sides(c) | {"max_position_embeddings": c.decoder.context, "scale_embedding": c.decoder.embed_scale != 1,
                       "decoder_start_token_id": c.start_id, "normalize_before": not c.decoder.stack.block.post_norm,
                       "normalize_embedding": c.decoder.stem_norm}  # fmt: skip
    if kind == "m2m_100":
        made["pad_token_id"] = c.decoder.positions.first - 1
    if kind == "marian":
        apart = c.encoder.vocabulary
        made |= {"share_encoder_decoder_embeddings": not apart, "vocab_size": apart or c.decoder.vocabulary,
                 "decoder_vocab_size": c.decoder.vocabulary, "forced_eos_token_id": None}  # fmt: skip
    return made


def whisper(c: WhisperConfig, kind: str) -> dict[str, Any]:
    return sides(c) | {"num_mel_bins": c.encoder.bands, "max_source_positions": c.encoder.context,
                       "max_target_positions": c.decoder.context, "scale_embedding": False}  # fmt: skip


def _stack(stack: StackConfig) -> dict[str, Any]:
    block = stack.block
    return {"hidden_size": block.attention.width, "intermediate_size": block.hidden,
            "num_hidden_layers": stack.layers, "num_attention_heads": block.attention.heads,
            "hidden_act": ACTIVATIONS[block.activation], "layer_norm_eps": block.norm_eps}  # fmt: skip


def _image(c: ViTConfig) -> dict[str, Any]:
    side = c.image[0] if c.image[0] == c.image[1] else list(c.image)
    return _stack(c.stack) | {"image_size": side, "patch_size": c.patch, "num_channels": c.channels}


def clip(c: CLIPConfig, kind: str) -> dict[str, Any]:
    text = _stack(c.text.stack) | {"vocab_size": c.text.vocabulary, "max_position_embeddings": c.text.context}
    image = _image(c.image) | {"image_size": c.image.image[0]}  # theirs are square
    if kind == "siglip":
        return {"text_config": text | {"projection_size": c.embed}, "vision_config": image}
    text["eos_token_id"] = c.eos_id
    return {"text_config": text, "vision_config": image, "projection_dim": c.embed}


def vit(c: ViTConfig, kind: str) -> dict[str, Any]:
    block = c.stack.block
    made = _image(c) | {"qkv_bias": block.attention.qkv_bias}
    if c.pool_map:
        made |= {"pooler_act": ACTIVATIONS[c.pool_map], "pooler_output_size": c.width}
    if kind.startswith("dinov2"):
        hidden = made.pop("intermediate_size")
        made |= {"mlp_ratio": 4 if block.gated else hidden // c.width, "use_swiglu_ffn": block.gated}
        made |= {"num_register_tokens": c.registers, "hidden_act": "gelu" if block.gated else made["hidden_act"]}
    if kind == "dinov3_vit":
        own = block.attention
        made |= {"num_register_tokens": c.registers, "use_gated_mlp": block.gated, "query_bias": own.qkv_bias,
                 "value_bias": own.qkv_bias, "key_bias": own.qkv_bias and own.key_bias,
                 "rope_theta": c.rotary.theta if c.rotary else 100.0}  # fmt: skip
    if kind == "beit":
        made |= {"use_absolute_position_embeddings": c.positions, "use_mean_pooling": c.pool == "mean",
                 "use_relative_position_bias": block.attention.grid is not None,
                 "layer_scale_init_value": 0.1 if block.layer_scale else 0.0}  # fmt: skip
    return made


BERTS = ("bert", "roberta", "xlm-roberta", "camembert", "albert", "electra", "mpnet")
BARTS = ("bart", "mbart", "m2m_100", "marian", "pegasus", "blenderbot")
VITS = ("vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "beit")
TOWERS = {
    **dict.fromkeys(BERTS, bert), "distilbert": distilbert, **dict.fromkeys(("t5", "mt5", "umt5"), t5),
    **dict.fromkeys(BARTS, bart), "whisper": whisper, "clip": clip, "siglip": clip, **dict.fromkeys(VITS, vit),
}  # fmt: skip
