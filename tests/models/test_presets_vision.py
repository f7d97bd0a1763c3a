"""The papers' sizes: as many parameters as the reference libraries' own models, all on the meta device."""

import pytest
from torch import nn

from multimodal.errors import UsageError
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerEncoder
from multimodal.models.presets import PRESETS, preset
from multimodal.models.presets_text import TEXT_PRESETS
from multimodal.models.vit import ViT
from multimodal.models.whisper import Whisper
from multimodal.weights.folder import build
from multimodal.weights.vision.open_clip import open_clip_architecture
from tests.helpers.counting import count, undrawn
from tests.helpers.spread import thin

TIMM = {
    "vit_ti16": "vit_tiny_patch16_224", "vit_s16": "vit_small_patch16_224", "vit_b16": "vit_base_patch16_224",
    "vit_b32": "vit_base_patch32_224", "vit_l16": "vit_large_patch16_224", "vit_h14": "vit_huge_patch14_224",
}  # fmt: skip
OPEN_CLIP = {"clip_b32": "ViT-B-32", "clip_b16": "ViT-B-16", "clip_l14": "ViT-L-14"}
# openai/whisper, README: name, layers of encoder and decoder, width, heads, ids, bands
WHISPER = {
    "tiny": (4, 4, 384, 6, 51865, 80), "tiny.en": (4, 4, 384, 6, 51864, 80), "base": (6, 6, 512, 8, 51865, 80),
    "base.en": (6, 6, 512, 8, 51864, 80), "small": (12, 12, 768, 12, 51865, 80),
    "small.en": (12, 12, 768, 12, 51864, 80), "medium": (24, 24, 1024, 16, 51865, 80),
    "medium.en": (24, 24, 1024, 16, 51864, 80), "large-v1": (32, 32, 1280, 20, 51865, 80),
    "large-v2": (32, 32, 1280, 20, 51865, 80), "large-v3": (32, 32, 1280, 20, 51866, 128),
    "large-v3-turbo": (32, 4, 1280, 20, 51866, 128),
}  # fmt: skip


def heads(stack: nn.Module) -> int:
    return stack.blocks[0].attention.heads


@thin(3, pytest.mark.ci)
@pytest.mark.parametrize("name", TIMM)
def test_vit_has_timms_parameters_and_heads(name):
    import timm

    with undrawn():
        reference = timm.create_model(TIMM[name], num_classes=1000, weight_init="skip")
    model = build(ViT, preset(name))
    assert count(model) == count(reference)
    assert heads(model.stack) == reference.blocks[0].attn.num_heads


@pytest.mark.ci
@pytest.mark.parametrize("name", OPEN_CLIP)
def test_clip_has_openclips_parameters_and_heads(name):
    import open_clip.model

    with undrawn():
        reference = open_clip.model.CLIP(**open_clip_architecture(OPEN_CLIP[name]))
    model = build(CLIP, preset(name))
    assert count(model) == count(reference)
    assert heads(model.image.stack) == reference.visual.transformer.resblocks[0].attn.num_heads
    assert heads(model.text.stack) == reference.transformer.resblocks[0].attn.num_heads


@pytest.mark.ci
@pytest.mark.parametrize("name", WHISPER)
def test_whisper_has_openais_parameters_and_heads(name):
    from whisper.model import AudioEncoder, TextDecoder  # Whisper itself makes a sparse tensor: not on meta

    layers, decoder_layers, width, attention_heads, ids, bands = WHISPER[name]
    with undrawn():
        encoder = AudioEncoder(bands, 1500, width, attention_heads, layers)
        decoder = TextDecoder(ids, 448, width, attention_heads, decoder_layers)
    model = build(Whisper, preset(f"whisper_{name}"))
    # the encoder's sinusoids are a buffer there and a parameter here
    assert count(model) == count(encoder) + encoder.positional_embedding.numel() + count(decoder)
    assert heads(model.encoder.stack) == heads(model.decoder.stack) == attention_heads


@pytest.mark.parametrize(("name", "total", "lstm"), [("s", 10.3, 320), ("m", 30.7, 640), ("l", 118.8, 640)])
def test_conformer_is_the_papers_encoder(name, total, lstm):
    """Blocks: torchaudio's, with the terms that differ (see below). Total: Gulati et al. 2020, table 1, in millions,
    for encoder and transducer decoder: 1k word pieces, an LSTM layer, a joint layer of the LSTM's width."""
    from torchaudio.models import Conformer

    config = preset(f"conformer_{name}")
    width, layers = config.width, config.layers
    with undrawn():
        reference = Conformer(width, config.block.attention.heads, 4 * width, layers, 31)
    model = build(ConformerEncoder, config)
    relative = width * width + 2 * width  # the projection of distances, and the biases u and v
    wider = width  # kernel 32, where torchaudio takes odd ones alone
    assert count(model.blocks) == count(reference) + layers * (relative + wider)
    embedding, gates, joint = 1024 * lstm, 4 * lstm * (2 * lstm + 2), (width + lstm + 1024) * lstm
    assert (count(model) + embedding + gates + joint) / 1e6 == pytest.approx(total, rel=0.05)


def test_every_preset_builds_and_an_unknown_one_names_the_near():
    assert len(PRESETS) == len(TIMM) + len(OPEN_CLIP) + len(WHISPER) + 3 + len(TEXT_PRESETS)
    with pytest.raises(UsageError, match="vit_b32"):
        preset("vit_b33")
