"""Readers of the files of `whisper_random`, and noise for the log-mel case. Peers without torch use them too, so torch
is imported only in functions that return tensors."""

import json
import os
import wave as wave_file
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# one greedy attempt per window; each library adds its name of the threshold of log probabilities
GREEDY = {"language": "en", "temperature": 0.0, "without_timestamps": True, "condition_on_previous_text": False,
          "compression_ratio_threshold": None, "no_speech_threshold": None}  # fmt: skip


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


def samples(path: Path) -> np.ndarray:
    """A WAV file of 16 bits as floats."""
    with wave_file.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def recordings(folder: Path, count: int) -> list[np.ndarray]:
    """speech.wav cut into `count` recordings."""
    return np.split(samples(folder / "speech.wav"), count)


def letters(text: str) -> list[int]:
    """Numbers of the letters of a CTC model's text."""
    return [ord(letter) for letter in text if letter.isalpha()]


def threads() -> int:
    return int(os.environ["OMP_NUM_THREADS"])


def expect(ids: Iterable[int], count: int | None, compared: int | None = None) -> list[int]:
    """The first `compared` ids. Raises RuntimeError if there are not `count` in all."""
    ids = [int(token) for token in ids]
    if count is not None and len(ids) != count:
        raise RuntimeError(f"expected {count} tokens, got {len(ids)}")
    return ids[:compared]


def segment_tokens(result: dict[str, Any]) -> list[int]:
    """Ids in openai-whisper's result, and in ours."""
    return [token for segment in result["segments"] for token in segment["tokens"]]
