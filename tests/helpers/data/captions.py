"""Captions by plain loops."""

import torch

from multimodal.blocks.stack import transformer
from multimodal.models.captioner import VisionEncoderDecoder, VisionEncoderDecoderConfig
from multimodal.models.text_config import TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.tokens.image.preprocessing import OPENAI_MEAN, OPENAI_STD, Preprocessing
from multimodal.tokens.text.bytepair import BytePairTokenizer
from multimodal.weights.folder import Checkpoint
from tests.helpers.tiny import randomized

RECORD = Preprocessing((16, 16), "squash", "bicubic", OPENAI_MEAN, OPENAI_STD, 0, 1.0)


CONTEXT = 20


def written(seed: int = 0, end: float = 0.0) -> Checkpoint:
    """A random captioner whose captions differ from image to image; `end` makes the end more probable."""
    tokenizer = BytePairTokenizer.train(["a red wall and the deep blue sea", "a dog runs on the green field"] * 3, 290)
    image = ViTConfig((16, 16), 8, transformer(16, 1, 2, 24), "none", False)
    text = TextConfig(tokenizer.vocab_size, CONTEXT, transformer(16, 2, 2, 24, source_width=16), True, False)
    model = randomized(VisionEncoderDecoder(VisionEncoderDecoderConfig(image, text)), seed)
    with torch.no_grad():
        model.decoder.embed.weight.mul_(4)
        model.decoder.head.weight.mul_(2)
        for block in model.decoder.stack.blocks:
            block.cross.out.weight.mul_(4)
        model.decoder.stack.norm.weight[0], model.decoder.stack.norm.bias[0] = 0, 1  # a state that is always 1
        model.decoder.head.weight[:, 0] = 0
        model.decoder.head.weight[:259, 0] = -60.0  # no control ids and no single bytes, which may be no letters
        model.decoder.head.weight[tokenizer.eos_id, 0] = end
    return Checkpoint(model, tokenizer, RECORD, "tiny")
