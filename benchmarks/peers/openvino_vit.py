"""OpenVINO's graph of timm's picture tower: weights in float32, sums in float32 or bfloat16."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.openclip import pixels
from benchmarks.peers.timm_vit import loaded

HINTS = {"float32": "f32", "bfloat16": "bf16"}


def encoder(
    folder: Path, device: str, name: str, batch: int, kind: str, tiny: bool = False
) -> Callable[[], np.ndarray]:
    import openvino

    threads, images = int(os.environ["OMP_NUM_THREADS"]), pixels(folder, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its tracer's
        graph = openvino.convert_model(
            loaded(folder, name, tiny), example_input=torch.zeros_like(images), input=list(images.shape)
        )
    settings = {"INFERENCE_PRECISION_HINT": HINTS[kind], "INFERENCE_NUM_THREADS": threads,
                "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}  # fmt: skip
    compiled = openvino.Core().compile_model(graph, "CPU", settings)
    if compiled.get_property("INFERENCE_NUM_THREADS") != threads:
        raise RuntimeError(f"OpenVINO does not keep to {threads} threads")
    request, given = compiled.create_infer_request(), images.numpy()

    def run() -> np.ndarray:
        return request.infer([given])[0]

    return run
