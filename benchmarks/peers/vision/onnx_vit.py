"""ONNX Runtime's graph of timm's image tower, in float32."""

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.peers.plain_files import array
from benchmarks.suite.process import prepare


def export(folder: Path, device: str, name: str, tiny: bool, to: str) -> None:
    """The graph as a file."""
    import torch

    from benchmarks.peers.vision.openclip import pixels
    from benchmarks.peers.vision.timm_vit import loaded

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from its tracer
        torch.onnx.export(loaded(folder, name, tiny), (pixels(folder, "cpu"),), to, dynamo=False,
                          input_names=["pixels"])  # fmt: skip


def encoder(folder: Path, device: str, name: str, batch: int, tiny: bool = False) -> Callable[[], np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    with tempfile.TemporaryDirectory() as place:
        to = f"{place}/model.onnx"
        prepare("benchmarks.peers.vision.onnx_vit:export", {"name": name, "tiny": tiny, "to": to}, folder, "cpu")
        session = onnxruntime.InferenceSession(to, options, providers=["CPUExecutionProvider"])
    given = {"pixels": array(folder, "pixels", "pixels")}

    def run() -> np.ndarray:
        return session.run(None, given)[0]

    return run
