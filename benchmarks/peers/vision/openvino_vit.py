"""OpenVINO's graph of timm's image tower: weights in float32, sums in float32 or bfloat16."""

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.peers.plain_files import array
from benchmarks.suite.process import prepare

HINTS = {"float32": "f32", "bfloat16": "bf16"}


def export(folder: Path, device: str, name: str, tiny: bool, to: str) -> None:
    """The graph as files, in float32."""
    import openvino
    import torch

    from benchmarks.peers.vision.openclip import pixels
    from benchmarks.peers.vision.timm_vit import loaded

    images = torch.zeros_like(pixels(folder, "cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from its tracer
        graph = openvino.convert_model(loaded(folder, name, tiny), example_input=images, input=list(images.shape))
    openvino.save_model(graph, to, compress_to_fp16=False)


def encoder(
    folder: Path, device: str, name: str, batch: int, kind: str, tiny: bool = False
) -> Callable[[], np.ndarray]:
    import openvino

    threads, images = int(os.environ["OMP_NUM_THREADS"]), array(folder, "pixels", "pixels")
    settings = {"INFERENCE_PRECISION_HINT": HINTS[kind], "INFERENCE_NUM_THREADS": threads,
                "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        given = {"name": name, "tiny": tiny, "to": f"{place}/model.xml"}
        prepare("benchmarks.peers.vision.openvino_vit:export", given, folder, "cpu")
        compiled = openvino.Core().compile_model(given["to"], "CPU", settings)
    if compiled.get_property("INFERENCE_NUM_THREADS") != threads:
        raise RuntimeError(f"OpenVINO does not keep to {threads} threads")
    request = compiled.create_infer_request()

    def run() -> np.ndarray:
        return request.infer([images])[0]

    return run
