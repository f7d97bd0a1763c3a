"""ONNX Runtime's graph of timm's picture tower, in float32."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.openclip import pixels
from benchmarks.peers.timm_vit import loaded


def encoder(folder: Path, device: str, name: str, batch: int, tiny: bool = False) -> Callable[[], np.ndarray]:
    import onnxruntime

    images, path = pixels(folder, "cpu"), folder / f"{os.getpid()}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its tracer's
        torch.onnx.export(loaded(folder, name, tiny), (images,), str(path), dynamo=False, input_names=["pixels"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {"pixels": images.numpy()}
    path.unlink()

    def run() -> np.ndarray:
        return session.run(None, given)[0]

    return run
