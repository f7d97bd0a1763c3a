"""ONNX Runtime on our exports, without torch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def call(folder: Path, device: str, kind: str, tokens: int = 0, **_: Any) -> Callable[[], Any]:
    """The first output of the graph, or so many greedy `tokens`."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    session = onnxruntime.InferenceSession(folder / kind / "model.onnx", options, providers=["CPUExecutionProvider"])
    inputs = load_file(folder / "inputs.safetensors")
    if tokens:
        return lambda: written(session, inputs["input_ids"], tokens)
    given = {one.name: inputs[one.name] for one in session.get_inputs()}
    first = session.get_outputs()[0].name
    return lambda: session.run([first], given)[0]


def written(session: Any, ids: np.ndarray, tokens: int) -> list[list[int]]:
    past = [one for one in session.get_inputs() if one.name.startswith("past")]
    state = [np.zeros((len(ids), one.shape[1], 0, one.shape[3]), np.float32) for one in past]
    seen, made = ids.shape[1], []
    for _ in range(tokens):
        given = dict(zip((one.name for one in past), state, strict=True))
        mask = np.ones((len(ids), seen), np.int64)
        logits, *state = session.run(None, given | {"input_ids": ids, "attention_mask": mask})
        ids = logits[:, -1:].argmax(-1)
        made.append(ids[:, 0].tolist())
        seen += 1
    return made
