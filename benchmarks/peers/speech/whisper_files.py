"""Readers of the files of `whisper_random`, and noise for the log-mel case. Peers without torch use them too, so torch
is imported only in functions that return tensors."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def about(folder: Path) -> dict[str, Any]:
    """`prompt`, `bands`, `vocabulary`."""
    return json.loads((folder / "about.json").read_text())


def inputs(folder: Path, device: str = "cpu") -> dict[str, "Tensor"]:
    """`mel` [B M 3000], `frames` [B 1500 D]."""
    from safetensors.torch import load_file

    return load_file(folder / "inputs.safetensors", device=device)


def noise(folder: Path, device: str, seconds: float, **other: Any) -> None:
    """wave.npy: `seconds` of noise at 16 kHz."""
    import torch

    wave = 0.1 * torch.randn(round(seconds * 16000), generator=torch.Generator().manual_seed(0))
    np.save(folder / "wave.npy", wave.numpy())


def wave(folder: Path) -> np.ndarray:
    return np.load(folder / "wave.npy")


def threads() -> int:
    return int(os.environ["OMP_NUM_THREADS"])


def expect(ids: list[int], count: int) -> list[int]:
    """Raises RuntimeError for a result of another length."""
    if len(ids) != count:
        raise RuntimeError(f"wrote {len(ids)} tokens, not {count}")
    return [int(token) for token in ids]
