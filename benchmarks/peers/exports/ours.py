"""Random models of preset sizes, their ONNX exports, and our own calls on the same inputs."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from multimodal.export.export import export
from multimodal.export.onnx import quantize
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.models.presets import PRESETS
from multimodal.models.text import TextTransformer
from multimodal.models.vit import ViT, ViTConfig
from multimodal.weights.folder import Checkpoint, load_folder, save_folder


def prepare(folder: Path, device: str, name: str, tiny: bool = False, size: int = 1, length: int = 0, **_: Any) -> None:
    """`folder/model`, `folder/float32` and `folder/int8` of a preset, and `inputs`: `size` rows of `length`."""
    torch.manual_seed(0)
    config: Any = PRESETS[name]
    if isinstance(config, ViTConfig):
        model, inputs = ViT(_short(config) if tiny else config), {"pixel_values": torch.randn(size, 3, *config.image)}
    elif isinstance(config, ConformerEncoderConfig):
        config = replace(config, layers=1) if tiny else config
        model, features = ConformerCTC(ConformerCTCConfig(config, 1000, None)), torch.randn(size, length, config.bands)
        inputs = {"input_features": features, "lengths": torch.full((size,), length)}
    else:
        model = TextTransformer(_short(config) if tiny else config)
        inputs = {"input_ids": torch.randint(3, 900, (size, length))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs |= {"token_type_ids": torch.zeros_like(inputs["input_ids"])} if config.segments > 1 else {}
    save_folder(Checkpoint(model.eval()), folder / "model")
    export(folder / "model", folder / "float32")
    shutil.copytree(folder / "float32", folder / "int8")
    quantize(folder / "int8" / "model.onnx")
    save_file(inputs, folder / "inputs.safetensors")


def _short(config: Any) -> Any:
    return replace(config, stack=replace(config.stack, layers=1))


def call(folder: Path, device: str, kind: str, tokens: int = 0, **_: Any) -> Callable[[], Any]:
    """The first output of the graph, or so many greedy `tokens`."""
    model = prepare_for_inference(load_folder(folder / "model"), kind, torch.device(device)).model
    inputs = load_file(folder / "inputs.safetensors")
    if tokens:
        return lambda: written(model, inputs["input_ids"], tokens)

    @torch.inference_mode()
    def run() -> Tensor:
        if isinstance(model, ViT):
            return model(inputs["pixel_values"])
        if isinstance(model, ConformerCTC):
            frames, _, _ = model.encode(inputs["input_features"], inputs["lengths"])
            return model.ctc_logits(frames)
        return model.states(inputs["input_ids"])

    return run


@torch.inference_mode()
def written(model: TextTransformer, ids: Tensor, tokens: int) -> list[list[int]]:
    cache, made = model.new_cache(capacity=ids.shape[1] + tokens), []
    for _ in range(tokens):
        ids = model(ids, cache=cache, last=1)[:, -1:].argmax(-1)
        made.append(ids[:, 0].tolist())
    return made
