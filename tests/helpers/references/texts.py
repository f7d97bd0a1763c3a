"""Tokenizer references: open_clip's CLIP tokenizer, a tiny SentencePiece model, random Unicode texts."""

import importlib.util
import io
import random
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def open_clip_tokenizer() -> ModuleType:
    """Load the tokenizer's file alone: importing all of open_clip takes seconds."""
    folder = Path(importlib.util.find_spec("open_clip").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("reference_clip_tokenizer", folder / "tokenizer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_pieces(folder: Path) -> Path:
    """A SentencePiece model with T5's ids: pad 0, eos 1, unk 2, no bos."""
    import sentencepiece

    text = ["the cat sat on the mat", "a photo of a dog", "s and p unk pad 0123456789"] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=60, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    path = folder / "tiny.model"
    path.write_bytes(model.getvalue())
    return path


def noise(count: int, length: int, seed: int = 0) -> list[str]:
    """Random characters from all of Unicode except surrogates."""
    draw = random.Random(seed)
    planes = [(0, 0x100), (0, 0xD800), (0xE000, 0x110000)]
    return ["".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(length)) for _ in range(count)]
