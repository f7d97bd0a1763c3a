"""Sizes of the papers' text models, for `presets.PRESETS`.

GPT-2: Radford et al. 2019, table 2, as released. GPT-3: Brown et al. 2020, table 2.1, dense throughout, where the
paper takes turns with banded attention; two of its rows do not add up, so 1.3B has 16 heads for the printed 24, and
13B is 5120 wide for 5140. Llama 2: Touvron et al. 2023; Llama 3 8B: Grattafiori et al. 2024; Mistral 7B: Jiang et al.
2023; Mixtral: Jiang et al. 2024; Qwen2: Yang et al. 2024; all five with the halves of heads turned, as in Hugging
Face's files. BERT, RoBERTa, ALBERT (version 2), DistilBERT and ELECTRA with the heads they were trained with; of
ELECTRA the discriminator. T5: Raffel et al. 2020, version 1.0; Switch: Fedus et al. 2022, as released. BART: Lewis et
al. 2020. M2M100: Fan et al. 2021. Transformer: Vaswani et al. 2017, table 3, with 37,000 ids in common; the paper names
no longest text, here 512."""

from dataclasses import replace
from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.experts import ExpertsConfig
from multimodal.blocks.stack import BlockConfig, StackConfig, transformer
from multimodal.models.encoder_decoder import EncoderDecoderConfig
from multimodal.models.text_config import PositionConfig, TextConfig


def gpt(width: int, layers: int, heads: int, context: int) -> TextConfig:
    """50,257 ids, four times the width inside, tanh-GELU, learned positions, tied logits."""
    return TextConfig(50257, context, transformer(width, layers, heads, 4 * width, activation="gelu_tanh"), True, True)


def llama(
    vocabulary: int, width: int, layers: int, heads: int, kv_heads: int | None, hidden: int, context: int,
    theta: float = 10000.0, window: int | None = None,
) -> TextConfig:  # fmt: skip
    """RMS norms with epsilon 1e-5, SwiGLU, no bias, logits through a map of their own."""
    attention = AttentionConfig(width, heads, kv_heads, bias=False)
    block = BlockConfig(attention, hidden, "silu", gated=True, norm="rms")
    positions = PositionConfig("rotary", theta=theta)
    return TextConfig(vocabulary, context, StackConfig(block, layers), True, False, positions=positions, window=window)


def mixtral(dense: TextConfig, experts: ExpertsConfig) -> TextConfig:
    """A mixture of experts in place of each feed-forward."""
    block = replace(dense.stack.block, experts=experts)
    return replace(dense, stack=replace(dense.stack, block=block))


def qwen2(width: int, layers: int, heads: int, kv_heads: int, hidden: int, vocabulary: int = 151936) -> TextConfig:
    """Llama with biases on query, key and value and epsilon 1e-6; the smaller ones have tied logits."""
    made = llama(vocabulary, width, layers, heads, kv_heads, hidden, 131072, theta=1e6)
    attention = replace(made.stack.block.attention, bias=True, out_bias=False)
    block = replace(made.stack.block, attention=attention, norm_eps=1e-6, feed_bias=False)
    return replace(made, stack=replace(made.stack, block=block), tied=width < 3584)


def bert(
    vocabulary: int, width: int, layers: int, activation: str = "gelu", norm_eps: float = 1e-12, **options: Any
) -> TextConfig:  # fmt: skip
    """Heads 64 wide, four times the width inside, norms after each sum, 512 positions."""
    stack = transformer(
        width, layers, width // 64, 4 * width, activation=activation, norm_eps=norm_eps, final_norm=False
    )
    stack = replace(stack, block=replace(stack.block, post_norm=True))
    masked = {"tied": True, "transform": True, "head_bias": True}  # logits as BERT's
    return TextConfig(vocabulary, 512, stack, causal=False, stem_norm=True, **masked | options)


def electra(width: int) -> TextConfig:
    """12 layers; embeddings are 128 wide or, in the base size, as wide as the blocks."""
    made = bert(30522, width, 12, tied=None, transform=False, head_bias=False, segments=2, detect=True)
    return replace(made, embed_width=None if width == 768 else 128)


def t5(width: int, layers: int, heads: int, hidden: int, head_width: int = 64) -> EncoderDecoderConfig:
    """32,128 ids, as many layers on both sides, ReLU, logits through the embedding, states times 1/√D."""
    attention = AttentionConfig(width, heads, head_width=head_width, bias=False, scale=1.0)
    stack = StackConfig(BlockConfig(attention, hidden, "relu", norm="rms", norm_eps=1e-6), layers)
    encoder = TextConfig(0, 512, stack, causal=False, positions=PositionConfig("bucket"))
    crossed = replace(stack, block=replace(stack.block, cross=attention))
    decoder = replace(encoder, vocabulary=32128, stack=crossed, causal=True, tied=True, logit_scale=width**-0.5)
    return EncoderDecoderConfig(encoder, decoder, start_id=0)


def switch(dense: EncoderDecoderConfig, experts: int) -> EncoderDecoderConfig:
    """One of the experts for each token in every second block, 64 tokens each."""
    chosen = ExpertsConfig(experts, 1, normalized=False, capacity=64, every=2)
    return replace(dense, encoder=mixtral(dense.encoder, chosen), decoder=mixtral(dense.decoder, chosen))


def encoder_decoder(
    vocabulary: int, width: int, layers: int, hidden: int, positions: PositionConfig, context: int = 1024, *,
    activation: str = "relu", post_norm: bool, scaled: bool, start_id: int, stem_norm: bool = False,
) -> EncoderDecoderConfig:  # fmt: skip
    """Heads 64 wide, as many layers on both sides, one embedding for both and for the logits."""

    def side(source_width: int | None) -> TextConfig:
        stack = transformer(
            width, layers, width // 64, hidden, activation=activation, final_norm=not post_norm,
            source_width=source_width,
        )  # fmt: skip
        return TextConfig(
            vocabulary if source_width else 0, context, replace(stack, block=replace(stack.block, post_norm=post_norm)),
            causal=source_width is not None, tied=True if source_width else None, stem_norm=stem_norm,
            positions=positions, embed_scale=width**0.5 if scaled else 1.0,
        )  # fmt: skip

    return EncoderDecoderConfig(side(None), side(width), start_id)


def bart(width: int, layers: int) -> EncoderDecoderConfig:
    made = encoder_decoder(
        50265, width, layers, 4 * width, PositionConfig("learned", first=2), activation="gelu", post_norm=True,
        scaled=False, start_id=2, stem_norm=True,
    )  # fmt: skip
    return replace(made, decoder=replace(made.decoder, head_bias="fixed"))


def m2m100(layers: int, hidden: int) -> EncoderDecoderConfig:
    waves = PositionConfig("sinusoidal", first=2, inclusive=True)
    return encoder_decoder(128112, 1024, layers, hidden, waves, post_norm=False, scaled=True, start_id=2)


def vaswani(width: int) -> EncoderDecoderConfig:
    waves = PositionConfig("sinusoidal", interleaved=True)
    return encoder_decoder(37000, width, 6, 4 * width, waves, 512, post_norm=True, scaled=True, start_id=0)


_BERT = {"segments": 2, "pool": "tanh", "classes": 2}  # the next sentence, or their order
_ALBERT = bert(30000, 768, 12, "gelu_tanh", embed_width=128, **_BERT)

TEXT_PRESETS: dict[str, Any] = {
    "gpt2": gpt(768, 12, 12, 1024),
    "gpt2_medium": gpt(1024, 24, 16, 1024),
    "gpt2_large": gpt(1280, 36, 20, 1024),
    "gpt2_xl": gpt(1600, 48, 25, 1024),
    "gpt3_125m": gpt(768, 12, 12, 2048),
    "gpt3_350m": gpt(1024, 24, 16, 2048),
    "gpt3_760m": gpt(1536, 24, 16, 2048),
    "gpt3_1.3b": gpt(2048, 24, 16, 2048),
    "gpt3_2.7b": gpt(2560, 32, 32, 2048),
    "gpt3_6.7b": gpt(4096, 32, 32, 2048),
    "gpt3_13b": gpt(5120, 40, 40, 2048),
    "gpt3_175b": gpt(12288, 96, 96, 2048),
    "llama2_7b": llama(32000, 4096, 32, 32, None, 11008, 4096),
    "llama2_13b": llama(32000, 5120, 40, 40, None, 13824, 4096),
    "llama2_70b": llama(32000, 8192, 80, 64, 8, 28672, 4096),
    "llama3_8b": llama(128256, 4096, 32, 32, 8, 14336, 8192, theta=500000.0),
    "mistral_7b": llama(32000, 4096, 32, 32, 8, 14336, 32768, window=4096),
    "mixtral_8x7b": mixtral(llama(32000, 4096, 32, 32, 8, 14336, 32768, theta=1e6), ExpertsConfig(8, 2)),
    "qwen2_0.5b": qwen2(896, 24, 14, 2, 4864),
    "qwen2_1.5b": qwen2(1536, 28, 12, 2, 8960),
    "qwen2_7b": qwen2(3584, 28, 28, 4, 18944, vocabulary=152064),
    "bert_base": bert(30522, 768, 12, **_BERT),
    "bert_large": bert(30522, 1024, 24, **_BERT),
    "roberta_base": replace(bert(50265, 768, 12, norm_eps=1e-5, segments=1), positions=PositionConfig(first=2)),
    "albert_base-v2": replace(_ALBERT, stack=replace(_ALBERT.stack, shared=1)),
    "distilbert_base": bert(30522, 768, 6),
    "electra_small": electra(256),
    "electra_base": electra(768),
    "t5_small": t5(512, 6, 8, 2048),
    "t5_base": t5(768, 12, 12, 3072),
    "t5_large": t5(1024, 24, 16, 4096),
    "t5_3b": t5(1024, 24, 32, 16384, 128),
    "t5_11b": t5(1024, 24, 128, 65536, 128),
    "switch_base-8": switch(t5(768, 12, 12, 3072), 8),
    "bart_base": bart(768, 6),
    "bart_large": bart(1024, 12),
    "m2m100_418m": m2m100(12, 4096),
    "m2m100_1.2b": m2m100(24, 8192),
    "transformer_base": vaswani(512),
    "transformer_big": vaswani(1024),
}
