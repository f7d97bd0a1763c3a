"""Tiny random checkpoint folders of each kind, and small valid files, for the tables and the fuzz."""

import json
import resource
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.blocks.stack import transformer
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.system.files import sha256
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.tokens.text.wordpiece import WordPieceTokenizer
from multimodal.train.objectives.text.translation import translator
from multimodal.weights.folder import Checkpoint, save_folder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s", "sea", "at", ".", *"abcdefgh"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit on the size of files, which stands for a full disk: the last write is cut in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def clip_and_asr(folder: Path) -> Path:
    """`clip` and `asr`."""
    torch.manual_seed(0)
    tokenizer = BytePairTokenizer.train(["a photo of a red square", "a photo of a blue square"], 270, lowercase=True)
    image = ViTConfig((32, 32), 16, transformer(32, 2, 4, 64), "token", True)
    text = TextConfig(tokenizer.vocab_size, 40, transformer(32, 2, 4, 64), True)
    clip = CLIP(CLIPConfig(image, text, 16, "softmax", "eos", tokenizer.eos_id))
    record = Preprocessing((32, 32), "shortest", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    card = {"licence": "MIT", "training_data": ["none"], "templates": ["a photo of a {}"]}
    save_folder(Checkpoint(clip, tokenizer, record, card=card), folder / "clip")
    block = ConformerConfig(AttentionConfig(32, 4), 64, 7)
    encoder = ConformerEncoderConfig(80, block, 1, 4, 8, rotary=True)
    asr = ConformerCTC(ConformerCTCConfig(encoder, tokenizer.vocab_size, None))
    save_folder(Checkpoint(asr, tokenizer, card={"licence": "MIT"}), folder / "asr")
    return folder


def every_kind(folder: Path) -> Path:
    """`clip`, `asr`, `captioner`, `lm` (bytes), `encoder` (masked words) and `translator` (en, de)."""
    clip_and_asr(folder)
    torch.manual_seed(1)
    tokenizer = BytePairTokenizer.train(["a red wall and the deep blue sea", "a dog on the green field"] * 3, 290)
    image = ViTConfig((16, 16), 8, transformer(16, 1, 2, 24), "none", False)
    text = TextConfig(tokenizer.vocab_size, 12, transformer(16, 2, 2, 24, source_width=16), True, False)
    record = Preprocessing((16, 16), "squash", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)
    save_folder(
        Checkpoint(VisionEncoderDecoder(VisionEncoderDecoderConfig(image, text)), tokenizer, record),
        folder / "captioner",
    )
    lm = TextTransformer(TextConfig(259, 40, transformer(16, 2, 2, 24), True, True))
    save_folder(Checkpoint(lm, ByteTokenizer()), folder / "lm")
    words = WordPieceTokenizer(WORDS, len(WORDS), WORDS.index("[CLS]"), WORDS.index("[SEP]"))
    encoder = TextTransformer(TextConfig(len(WORDS), 24, transformer(16, 2, 2, 24), False, True))
    save_folder(Checkpoint(encoder, words), folder / "encoder")
    pairs = BytePairTokenizer.train(["the cat sat on the mat", "die katze sass"], 290, languages=("en", "de"))
    save_folder(Checkpoint(translator(pairs, 16, (1, 1), 2, 24, 24, 0.0), pairs), folder / "translator")
    return folder


def write_tone(path: Path, rate: int = 16000, seconds: float = 1.0) -> Path:
    """A WAV file, mono, 16 bit."""
    samples = (np.sin(np.arange(int(rate * seconds)) * 0.2) * 8000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


def write_image(path: Path, colour: str = "red", size: tuple[int, int] = (50, 40)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path


def sealed(folder: Path) -> Path:
    """The folder with a manifest that fits again, so that what comes after the sums is tested."""
    files = [path for path in folder.iterdir() if path.name != "manifest.json"]
    sums = {path.name: sha256(path) for path in files}
    (folder / "manifest.json").write_text(json.dumps({"sha256": sums}))
    return folder
