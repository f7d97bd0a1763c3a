"""A random wav2vec 2.0 of the base size: transformers' folder, and an ONNX model in the layout of sherpa-onnx.

`prepare` writes into its folder
    hub/             transformers' model, processor and vocabulary
    KIND.onnx        samples [1 N] -> logits [1 T V], exported from transformers' model; int8 by onnxruntime's quantizer
    tokens.txt       sherpa-onnx's vocabulary
    speech.wav       16 kHz, mono, 16 bits
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.speech.whisper_random import save_wave, speech

CONTROL = 5  # tokens before the letters; only the blank is written by libraries alike
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVKXJQZ'"]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "conv_dim": [32] * 7, "num_conv_pos_embedding_groups": 2}  # fmt: skip
SPREAD = 8.0  # factor of the head's weights, so that the best letter leads by far more than float32's error


class LogitsOfSamples(nn.Module):
    """The model from normalized samples."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, samples: Tensor) -> Tensor:
        return self.model(samples).logits


def prepare(
    folder: Path, device: str, seconds: float, kinds: Sequence[str] = (), tiny: bool = False, **other: Any
) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    torch.manual_seed(0)
    sizes = {"attn_implementation": "eager"} | (TINY if tiny else {})
    model = Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=len(LETTERS), **sizes)).eval().requires_grad_(False)
    model.lm_head.weight.mul_(SPREAD)
    model.lm_head.bias[1:CONTROL] = -100
    hub = folder / "hub"
    model.save_pretrained(hub)
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))
    Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(hub)
    Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(hub)
    (folder / "tokens.txt").write_text("".join(f"{letter} {i}\n" for i, letter in enumerate(LETTERS)))
    save_wave(folder / "speech.wav", speech(seconds))
    for kind in kinds:
        export(model, folder, kind)


def export(model: nn.Module, folder: Path, kind: str) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = folder / "float32.onnx"
    if not whole.exists():
        torch.onnx.export(LogitsOfSamples(model), (torch.zeros(1, 16000),), str(whole), input_names=["x"], dynamo=False,
                          output_names=["logits"], dynamic_axes={"x": {1: "N"}, "logits": {1: "T"}})  # fmt: skip
    if kind == "int8":
        quantize_dynamic(whole, folder / "int8.onnx", op_types_to_quantize=["MatMul"], weight_type=QuantType.QUInt8)
