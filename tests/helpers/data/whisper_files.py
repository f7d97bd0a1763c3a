"""Whisper files of other programs, written by their documented layouts from OpenAI's names."""

import json
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from multimodal.weights.files.ggml import SIZES
from multimodal.weights.speech.whisper_vocabulary import NAMES, released_tokenizer

# (specs/model_spec.py, `_dtype_to_type_id`)
IDS = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}
NORMS = {
    "cross_attn_ln": "attention/layer_norm", "attn_ln": "self_attention/layer_norm", "mlp_ln": "ffn/layer_norm",
    "/ln_post": "/layer_norm", "/ln": "/layer_norm",
}  # fmt: skip
GGML = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}


def ctranslate2(folder: Path, state: dict[str, Tensor], dims: dict[str, int], kind: str = "float32") -> None:
    """A folder as ctranslate2's converter writes; `kind`: float32, float16, or int8 for maps and convolutions."""
    tensors = {name: tensor.numpy() for name, tensor in _ct2_names(state).items()}
    variables: dict[str, np.ndarray] = {
        "encoder/num_heads": np.int16(dims["n_audio_head"]), "decoder/num_heads": np.int16(dims["n_text_head"]),
        "decoder/pre_norm": np.int8(1), "decoder/activation": np.int8(3), "decoder/scale_embeddings": np.int8(0),
    }  # fmt: skip
    for name, tensor in tensors.items():
        if kind == "int8" and name.endswith("weight"):
            scale = 127 / np.abs(tensor).reshape(len(tensor), -1).max(1)
            scaled = tensor * scale.reshape(-1, *[1] * (tensor.ndim - 1))
            variables |= {name: np.rint(scaled).astype(np.int8), f"{name}_scale": scale.astype(np.float32)}
        else:
            variables[name] = tensor.astype("float16" if kind == "float16" else "float32")
    parts = [struct.pack("<I", 6), _text("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for name, value in sorted(variables.items()):
        parts += [_text(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)]
        parts += [struct.pack("<BI", IDS[value.dtype.name], value.nbytes), value.tobytes()]
    parts += [struct.pack("<I", 1), _text("decoder/projection/weight"), _text("decoder/embeddings/weight")]
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"".join(parts))
    (folder / "config.json").write_text(json.dumps({"alignment_heads": [[1, 0]], "suppress_ids": [1], "lang_ids": []}))
    (folder / "vocabulary.json").write_text("[]")


def _text(name: str) -> bytes:
    return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"


def _ct2_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"decoder/embeddings/weight": state["decoder.token_embedding.weight"]}
    norm = {"weight": "gamma", "bias": "beta"}
    for name, tensor in state.items():
        path, _, part = name.rpartition(".")
        place = path.replace(".blocks.", ".layer_").replace(".", "/")
        if name.endswith("positional_embedding"):
            found[f"{path}/position_encodings/encodings"] = tensor
        elif path.endswith(("conv1", "conv2")):
            found[f"{place}/{part}"] = tensor
        elif path.endswith(("ln", "ln_post")):
            for theirs, ours in NORMS.items():
                place = place.replace(theirs, ours)
            found[f"{place}/{norm[part]}"] = tensor
        elif "mlp" in path:
            place = place.replace("mlp/0", "ffn/linear_0").replace("mlp/2", "ffn/linear_1")
            found[f"{place}/{part}"] = tensor
        elif path.endswith("attn.query"):
            own = path.removesuffix("query")
            key = state.get(f"{own}key.{part}", torch.zeros_like(tensor))  # which has no bias
            value = state[f"{own}value.{part}"]
            crossed = "cross" in path
            place = place.removesuffix("/query").replace("cross_attn", "attention").replace("/attn", "/self_attention")
            if crossed:
                found[f"{place}/linear_0/{part}"], found[f"{place}/linear_1/{part}"] = tensor, torch.cat([key, value])
            else:
                found[f"{place}/linear_0/{part}"] = torch.cat([tensor, key, value])
            found[f"{place}/linear_{1 + crossed}/{part}"] = state[f"{own}out.{part}"]
    return found


def text_tokens(size: int) -> list[bytes]:
    """Tokens of the released vocabulary, without its control tokens."""
    tokenizer = released_tokenizer(size)
    return [tokenizer._encoding.decode_single_token_bytes(i) for i in range(tokenizer.plain_size)]


def ggml(path: Path, state: dict[str, Tensor], dims: dict[str, int], kind: str = "f32") -> dict[str, Tensor]:
    """A file as whisper.cpp's converter and `quantize` write; returns the numbers that it stands for."""
    parts = [struct.pack("<I", 0x67676D6C), struct.pack("<11i", *(dims[name] for name in SIZES), GGML[kind])]
    tokens = text_tokens(dims["n_vocab"]) if dims["n_vocab"] in NAMES else [b"a", b" th"]
    parts += [struct.pack("<2I2f", 1, 2, 0.5, 0.5), struct.pack("<I", len(tokens))]
    parts += [struct.pack("<I", len(token)) + token for token in tokens]
    real = {}
    for name, tensor in state.items():
        # biases, norms and positions stay float32, convolutions are at most halved
        small = tensor.ndim < 2 or "positional" in name
        own = "f32" if small else "f16" if tensor.ndim == 3 and kind != "f32" else kind
        array = tensor[:, None] if "conv" in name and name.endswith("bias") else tensor
        parts.append(struct.pack("<3i", array.ndim, len(name), GGML[own]))
        parts.append(struct.pack(f"<{array.ndim}i", *reversed(array.shape)) + name.encode())
        if own in ("f32", "f16"):
            values = array.numpy().astype("float32" if own == "f32" else "float16")
            data, real[name] = values.tobytes(), torch.from_numpy(values.astype("float32")).reshape(tensor.shape)
        else:
            blocks = [_block(block, own) for block in array.reshape(-1, 32).tolist()]
            data = b"".join(packed for packed, _ in blocks)
            real[name] = torch.tensor([values for _, values in blocks]).reshape(tensor.shape)
        parts.append(data)
    path.write_bytes(b"".join(parts))
    return real


def _block(values: list[float], kind: str) -> tuple[bytes, list[float]]:
    """32 weights in ggml-quants.c's layout, and what they are afterwards, number by number."""
    bits, offset = int(kind[1]), kind.endswith("_1")
    if kind == "q8_0":
        step = _half(max(map(abs, values)) / 127)
        quants = [round(value / step) for value in values]
        return struct.pack("<e32b", step, *quants), [step * q for q in quants]
    top = 2**bits - 1
    low = _half(min(values)) if offset else 0.0
    step = _half((max(values) - low) / top if offset else max(map(abs, values)) / 2 ** (bits - 1))
    middle = 0 if offset else 2 ** (bits - 1)
    quants = [min(max(round((value - low) / step) + middle, 0), top) for value in values]
    head = struct.pack("<2e", step, low) if offset else struct.pack("<e", step)
    fifth = struct.pack("<I", sum((q >> 4) << i for i, q in enumerate(quants))) if bits == 5 else b""
    nibbles = bytes(quants[i] % 16 + 16 * (quants[i + 16] % 16) for i in range(16))
    return head + fifth + nibbles, [step * (q - middle) + low for q in quants]


def _half(value: float) -> float:
    return struct.unpack("<e", struct.pack("<e", value))[0]
