"""torchaudio's mel spectrogram with Whisper's settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.speech.whisper_files import wave


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    from torchaudio.transforms import MelSpectrogram

    samples = torch.from_numpy(wave(folder)).to(device)
    transform = MelSpectrogram(16000, 400, hop_length=160, n_mels=80, norm="slaney", mel_scale="slaney").to(device)

    @torch.inference_mode()
    def run() -> Tensor:
        mel = transform(samples)[:, :-1].clamp(min=1e-10).log10()
        return (mel.maximum(mel.max() - 8) + 4) / 4

    return run
