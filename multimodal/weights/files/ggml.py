"""whisper.cpp's ggml files of Whisper, read as data (models/convert-pt-to-ggml.py, `whisper_model_load`)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.weights.files.binary import BinaryReader, binary_reader

# of the header, in this order, then the number type of most weights
SIZES = ("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer",
         "n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels")  # fmt: skip
MOST_SIZE = 1 << 20
FLOATS = {0: torch.float32, 1: torch.float16}
QUANTIZED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")


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
    tensor = reader.tensor(FLOATS[kind], shape, what) if kind in FLOATS else _quantized(reader, kind, shape, what)
    # a convolution's bias has a second axis of 1 there
    return name, tensor[:, 0] if name.endswith("bias") and tensor.ndim == 2 and tensor.shape[1] == 1 else tensor


def _quantized(reader: BinaryReader, kind: int, shape: tuple[int, ...], what: str) -> Tensor:
    """The numbers that a tensor's blocks stand for."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    known = {member.value: member for member in GGMLQuantizationType}
    name = known[kind].name.lower() if kind in known else f"type {kind}"
    if name not in QUANTIZED:
        raise ValueError(f"{what} is quantized as {name}, expected one of f32, f16, {', '.join(QUANTIZED)}")
    weights, size = GGML_QUANT_SIZES[known[kind]]
    if not shape or not shape[-1] or shape[-1] % weights:
        raise ValueError(f"{what} of shape {list(shape)} does not split in blocks of {weights}")
    rows = reader.tensor(torch.uint8, (*shape[:-1], shape[-1] // weights * size), what)
    with np.errstate(all="ignore"):  # a damaged scale
        return torch.from_numpy(dequantize(rows.numpy(), known[kind]))
