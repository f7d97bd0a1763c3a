"""ONNX Runtime's and OpenVINO's graphs of timm's image tower: weights in float32, sums in float32 or bfloat16."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.plain_files import array
from benchmarks.suite.process import prepare

HINTS = {"float32": "f32", "bfloat16": "bf16"}


def export(folder: Path, device: str, name: str, tiny: bool, to: str) -> None:
    """Write the graph, for OpenVINO if `to` ends in .xml, else as ONNX."""
    import torch

    from benchmarks.peers.vision.openclip import pixels
    from benchmarks.peers.vision.timm_vit import loaded

    model, images = loaded(folder, name, tiny), pixels(folder, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the tracer
        if not to.endswith(".xml"):
            torch.onnx.export(model, (images,), to, dynamo=False, input_names=["pixels"])
            return
        import openvino

        graph = openvino.convert_model(model, example_input=torch.zeros_like(images), input=list(images.shape))
    openvino.save_model(graph, to, compress_to_fp16=False)


@contextmanager
def exported(folder: Path, name: str, tiny: bool, file: str) -> Iterator[str]:
    """Path of the graph, exported in another process, which keeps torch out of this one's memory."""
    with tempfile.TemporaryDirectory() as place:
        settings = {"name": name, "tiny": tiny, "to": f"{place}/{file}"}
        prepare("benchmarks.peers.vision.graph_vit:export", settings, folder, "cpu")
        yield settings["to"]


def onnx(folder: Path, device: str, name: str, tiny: bool = False, **other: Any) -> Callable[[], np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    with exported(folder, name, tiny, "model.onnx") as path:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    images = array(folder, "pixels", "pixels")
    return lambda: session.run(None, {"pixels": images})[0]


def openvino(
    folder: Path, device: str, name: str, kind: str, tiny: bool = False, **other: Any
) -> Callable[[], np.ndarray]:
    import openvino

    threads, images = int(os.environ["OMP_NUM_THREADS"]), array(folder, "pixels", "pixels")
    settings = {"INFERENCE_PRECISION_HINT": HINTS[kind], "INFERENCE_NUM_THREADS": threads,
                "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}  # fmt: skip
    with exported(folder, name, tiny, "model.xml") as path:
        compiled = openvino.Core().compile_model(path, "CPU", settings)
    if compiled.get_property("INFERENCE_NUM_THREADS") != threads:
        raise RuntimeError(f"expected OpenVINO to use {threads} threads, got another number")
    request = compiled.create_infer_request()
    return lambda: request.infer([images])[0]
