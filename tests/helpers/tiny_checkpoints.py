"""Tiny checkpoints of each kind with one byte tokenizer."""

from dataclasses import replace
from pathlib import Path

from multimodal.models.captioner import VisionEncoderDecoder
from multimodal.models.clip import CLIP
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT
from multimodal.tokens.image.preprocessing import Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.weights.folder import Checkpoint
from tests.helpers.tiny import CAPTIONER, CLIPS, ENCODER, TEXT_TO_TEXT, TEXTS, VIT, conformer, randomized, text

BYTES = BytePairTokenizer.train(["zq zq"] * 3, 262)  # has tokens for begin and end
IDS = BYTES.vocab_size
RECORD = Preprocessing((8, 12), "squash", "bilinear", (0.5,) * 3, (0.5,) * 3, 0, 1.0)


def of_bytes(config, context: int = 32):
    return replace(config, vocabulary=IDS if config.vocabulary else 0, context=context)


def checkpoint(kind: str) -> Checkpoint:
    """A tiny model over bytes."""
    if kind in TEXTS:
        return Checkpoint(randomized(TextTransformer(of_bytes(TEXTS[kind]))), BYTES, source=kind)
    if kind == "encoder":
        return Checkpoint(randomized(TextTransformer(of_bytes(ENCODER))), BYTES, source=kind)
    if kind == "text-to-text":
        parts = {name: of_bytes(getattr(TEXT_TO_TEXT, name)) for name in ("encoder", "decoder")}
        return Checkpoint(randomized(EncoderDecoder(replace(TEXT_TO_TEXT, **parts))), BYTES, source=kind)
    if kind == "captioner":
        model = VisionEncoderDecoder(replace(CAPTIONER, decoder=of_bytes(CAPTIONER.decoder)))
        return Checkpoint(randomized(model), BYTES, RECORD, kind)
    if kind == "joint":
        config = ConformerCTCConfig(conformer(), IDS, of_bytes(text(tied=False, source=True)))
        return Checkpoint(randomized(ConformerCTC(config)), BYTES, source=kind)
    models = {"vit": (ViT, VIT), "clip": (CLIP, CLIPS["sigmoid"])}
    model_class, config = models[kind]
    return Checkpoint(randomized(model_class(config)), None, RECORD, kind)


def source_of(files: dict[str, Path], kind: str) -> str:
    """The file or text that a view of this kind of model takes."""
    if kind in ("clip", "vit", "captioner"):
        return str(files["image"])
    return str(files["sound"]) if kind == "joint" else "ab cab"
