"""whisper.cpp's ggml files of Whisper, read as data (models/convert-pt-to-ggml.py, `whisper_model_load`), with the
block formats of ggml-quants.c."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimodal.weights.files.binary import BinaryReader, binary_reader

# of the header, in this order, then the number type of most weights
SIZES = ("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
         "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels")  # fmt: skip
MOST_SIZE = 1 << 20
BLOCK = 32  # weights


class BlockType(NamedTuple):
    """A quantized type: bytes of a block, and what they stand for."""

    size: int
    load: Callable[[Tensor], Tensor]


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The lower halves of 16 bytes, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], 1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Bit i of a 32-bit number, as the highest of five."""
    bits = blocks[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


FLOATS = {0: torch.float32, 1: torch.float16}
BLOCKS = {
    2: BlockType(18, lambda b: _half(b, 0) * (_nibbles(b[:, 2:]).float() - 8)),  # q4_0
    3: BlockType(20, lambda b: _half(b, 0) * _nibbles(b[:, 4:]).float() + _half(b, 2)),  # q4_1
    6: BlockType(22, lambda b: _half(b, 0) * ((_nibbles(b[:, 6:]) | _fifth_bits(b, 2)).float() - 16)),  # q5_0
    7: BlockType(24, lambda b: _half(b, 0) * (_nibbles(b[:, 8:]) | _fifth_bits(b, 4)).float() + _half(b, 2)),  # q5_1
    8: BlockType(34, lambda b: _half(b, 0) * b[:, 2:].view(torch.int8).float()),  # q8_0
}
# types that are named and not read (ggml.h, ggml_type)
OTHERS = {9: "q8_1", 10: "q2_K", 11: "q3_K", 12: "q4_K", 13: "q5_K", 14: "q6_K", 15: "q8_K", 30: "bf16"}


def read_ggml(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights under OpenAI's names, quantized ones as the numbers that they stand for, `dims`, and the tokens of the
    `vocabulary`. The mel filters are skipped: they follow from their number. Raises CheckpointError."""
    with binary_reader(path, "a ggml file of whisper.cpp") as reader:
        reader.numbers("I", "the magic number")
        dims = dict(zip(SIZES, reader.numbers(f"{len(SIZES)}i", "the sizes"), strict=True))
        if wrong := [name for name, value in dims.items() if not 1 <= value <= MOST_SIZE]:
            raise ValueError(f"not of Whisper: {wrong[0]} is {dims[wrong[0]]}")
        reader.numbers("i", "the number type")
        bands, bins = reader.numbers("2I", "the mel filters")
        reader.bytes(4 * bands * bins, "the mel filters")
        (count,) = reader.numbers("I", "the vocabulary")
        tokens = [bytes(reader.bytes(*reader.numbers("I", "the vocabulary"), "the vocabulary")) for _ in range(count)]
        weights: dict[str, Tensor] = {}
        while reader.left:
            name, tensor = _tensor(reader)
            if name in weights:
                raise ValueError(f"tensor {name!r} appears twice")
            weights[name] = tensor
    return weights, {"dims": dims, "vocabulary": tokens}


def _tensor(reader: BinaryReader) -> tuple[str, Tensor]:
    axes, size, kind = reader.numbers("3i", "a tensor")
    shape = reader.shape(axes, "a tensor")[::-1]
    name = reader.text(max(size, 0), "a tensor's name")
    what = f"tensor {name!r}"
    if kind in FLOATS:
        tensor = reader.tensor(FLOATS[kind], shape, what)
    elif kind not in BLOCKS:
        known = "f32, f16, q4_0, q4_1, q5_0, q5_1, q8_0"
        raise ValueError(f"{what} is quantized as {OTHERS.get(kind, f'type {kind}')}, expected one of {known}")
    elif not shape or shape[-1] % BLOCK:
        raise ValueError(f"{what} of shape {list(shape)} does not split in blocks of {BLOCK}")
    else:
        block = BLOCKS[kind]
        blocks = reader.tensor(torch.uint8, (math.prod(shape) // BLOCK, block.size), what)
        tensor = block.load(blocks).reshape(shape)
    # a convolution's bias has a second axis of 1 there
    return name, tensor[:, 0] if name.endswith("bias") and tensor.ndim == 2 and tensor.shape[1] == 1 else tensor
