"""Random Whisper weights as whisper.cpp's converter and `quantize` write them."""

import struct
from pathlib import Path
from typing import IO

import gguf
import numpy as np

from multimodal.tokens.audio.log_mel import mel_filters
from multimodal.weights.files.ggml import SIZES
from multimodal.weights.folder import Checkpoint
from multimodal.weights.speech.whisper import WHISPER_OPENAI

# number of a file's type: that of most weights, and 1,000 × the version of the quantized ones
TYPES = {"float16": ("F16", 1), "int8": ("Q8_0", 2007)}
FFT = 400


def save_ggml(made: Checkpoint, dims: dict[str, int], path: Path, kind: str) -> None:
    """One file; `dims`: OpenAI's."""
    with path.open("wb") as file:
        file.write(struct.pack("<I11i", 0x67676D6C, *(dims[size] for size in SIZES), TYPES[kind][1]))
        filters = mel_filters(dims["n_mels"], FFT).numpy().astype(np.float32)
        file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        tokenizer = made.tokenizer
        tokens = [tokenizer._encoding.decode_single_token_bytes(i) for i in range(tokenizer.plain_size)]
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for key, tensor in WHISPER_OPENAI.export(made.model).items():
            array = tensor.float().numpy()
            kept = array.ndim < 2 or key.endswith("positional_embedding")
            if "conv" in key and key.endswith("bias"):
                array = array[:, None]
            # convolutions must have float16, so no file can have float32
            one = "F32" if kept else "F16" if array.ndim == 3 else TYPES[kind][0]
            _tensor(file, key, array, gguf.GGMLQuantizationType[one])


def _tensor(file: IO[bytes], name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    file.write(struct.pack("<3i", array.ndim, len(name), kind))
    file.write(struct.pack(f"<{array.ndim}i", *reversed(array.shape)) + name.encode())
    file.write(gguf.quants.quantize(array, kind).tobytes())
