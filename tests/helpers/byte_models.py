"""Tiny language models over bytes."""

import torch

from multimodal.blocks.stack import transformer
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig
from multimodal.tokens.text.sentencepiece import ByteTokenizer
from multimodal.weights.folder import Checkpoint


def byte_model(context: int = 40, positions: str = "learned", window: int | None = None) -> Checkpoint:
    torch.manual_seed(1)
    config = TextConfig(259, context, transformer(16, 2, 2, 24), True, True, positions=PositionConfig(positions),
                        window=window)  # fmt: skip
    model = TextTransformer(config)
    with torch.no_grad():
        model.embed.weight.mul_(30)
    return Checkpoint(model.eval(), ByteTokenizer(), source="tiny")
