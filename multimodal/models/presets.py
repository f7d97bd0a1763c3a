"""Configurations of the papers' sizes: `preset("vit_b16")`, then `dataclasses.replace` to change them.

ViT: Dosovitskiy et al. 2021, table 1, and DeiT's Ti and S (Touvron et al. 2021); 224 px, 1000 classes.
CLIP: Radford et al. 2021, table 20, with the quick-GELU of OpenAI's weights and 224 px.
Whisper: openai/whisper, `ModelDimensions` of each release. Conformer: Gulati et al. 2020, table 1, encoders only.
Text models: `presets_text`."""

import difflib
from typing import Any

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.blocks.stack import transformer
from multimodal.errors import UsageError
from multimodal.models.clip import CLIPConfig
from multimodal.models.conformer import ConformerEncoderConfig
from multimodal.models.presets_text import TEXT_PRESETS
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.models.whisper import WhisperConfig, WhisperEncoderConfig


def vit(width: int, layers: int, heads: int, patch: int) -> ViTConfig:
    """Class token, four times the width inside, epsilon 1e-6."""
    stack = transformer(width, layers, heads, 4 * width, norm_eps=1e-6)
    return ViTConfig((224, 224), patch, stack, "token", class_token=True, classes=1000)


def clip(width: int, layers: int, patch: int, text_width: int, embed: int) -> CLIPConfig:
    """Heads are 64 wide in both towers; the text tower has 12 layers and 77 positions of 49,408 ids."""
    stack = transformer(width, layers, width // 64, 4 * width, activation="quick_gelu")
    image = ViTConfig((224, 224), patch, stack, "token", class_token=True, patch_bias=False, stem_norm=True)
    words = transformer(text_width, 12, text_width // 64, 4 * text_width, activation="quick_gelu")
    return CLIPConfig(image, TextConfig(49408, 77, words, causal=True), embed, "softmax", "eos", eos_id=49407)


def whisper(width: int, layers: int, decoder_layers: int, vocabulary: int, bands: int = 80) -> WhisperConfig:
    """30 s in 1500 positions, 448 positions of text, heads 64 wide, no bias on keys."""
    heads, hidden = width // 64, 4 * width
    encoder = WhisperEncoderConfig(bands, 1500, transformer(width, layers, heads, hidden, key_bias=False))
    words = transformer(width, decoder_layers, heads, hidden, key_bias=False, source_width=width)
    return WhisperConfig(encoder, TextConfig(vocabulary, 448, words, causal=True, tied=True))


def conformer(width: int, layers: int, heads: int) -> ConformerEncoderConfig:
    """80 bands, subsampling 4, relative positions, kernel 32, feed-forward 4 × width, dropout 0.1.

    The convolution's norm is LayerNorm, which ignores padding, in place of BatchNorm (as many parameters). The paper's
    transducer decoder is not included."""
    attention = AttentionConfig(width, heads, relative=True, dropout=0.1)
    return ConformerEncoderConfig(80, ConformerConfig(attention, 4 * width, 32, dropout=0.1), layers, 4, width)


_MULTILINGUAL, _ENGLISH, _CANTONESE = 51865, 51864, 51866  # ids; large-v3 has one language more
_WHISPER = {"tiny": (384, 4), "base": (512, 6), "small": (768, 12), "medium": (1024, 24)}

PRESETS: dict[str, Any] = {
    "vit_ti16": vit(192, 12, 3, 16),
    "vit_s16": vit(384, 12, 6, 16),
    "vit_b16": vit(768, 12, 12, 16),
    "vit_b32": vit(768, 12, 12, 32),
    "vit_l16": vit(1024, 24, 16, 16),
    "vit_h14": vit(1280, 32, 16, 14),
    "clip_b32": clip(768, 12, 32, 512, 512),
    "clip_b16": clip(768, 12, 16, 512, 512),
    "clip_l14": clip(1024, 24, 14, 768, 768),
    **{f"whisper_{name}": whisper(width, n, n, _MULTILINGUAL) for name, (width, n) in _WHISPER.items()},
    **{f"whisper_{name}.en": whisper(width, n, n, _ENGLISH) for name, (width, n) in _WHISPER.items()},
    "whisper_large-v1": whisper(1280, 32, 32, _MULTILINGUAL),
    "whisper_large-v2": whisper(1280, 32, 32, _MULTILINGUAL),
    "whisper_large-v3": whisper(1280, 32, 32, _CANTONESE, bands=128),
    "whisper_large-v3-turbo": whisper(1280, 32, 4, _CANTONESE, bands=128),
    "conformer_s": conformer(144, 16, 4),
    "conformer_m": conformer(256, 16, 4),
    "conformer_l": conformer(512, 17, 8),
    **TEXT_PRESETS,
}


def preset(name: str) -> Any:
    """The configuration of this name. Raises UsageError with similar names if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4) or sorted(PRESETS)
        raise UsageError(f"unknown preset {name!r}; did you mean {', '.join(near)}?")
    return PRESETS[name]
