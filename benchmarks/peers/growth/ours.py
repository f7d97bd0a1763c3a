"""Ours from image files and labels to scores, and ViTs of growing size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.growth.scores import TEMPLATE, in_order, inputs
from benchmarks.peers.train.ours import load_vit
from benchmarks.peers.train.step import tensors
from multimodal import classify, load
from multimodal.inference.prepare import prepare_for_inference


def scores(folder: Path, device: str, kind: str, **_: Any) -> Callable[[], Any]:
    """[images, labels]"""
    files, labels = inputs(folder)
    checkpoint = prepare_for_inference(load(str(folder / "open_clip")), kind, device)

    def run() -> Any:
        results = classify(files, labels, checkpoint, templates=[TEMPLATE])
        return in_order([one["scores"] for one in results], labels)

    return run


def vit(folder: Path, device: str, kind: str, **sizes: Any) -> Callable[[], Tensor]:
    """[B classes]"""
    model, pixels = load_vit(folder, **sizes), tensors(folder, "batch", device)["pixels"]
    model = prepare_for_inference(model, kind, device).model
    return torch.inference_mode()(lambda: model(pixels))
