"""torchaudio's Conformer on a GPU with a stem and CTC output of FastConformer large's sizes (Rekesh et al. 2023), from
samples to tokens, and random weights and audio for all candidates."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.peers.cuda.common import ready

SIZES = {"width": 512, "layers": 17, "heads": 8, "kernel": 9, "channels": 256, "vocabulary": 1024}
TINY = {"width": 32, "layers": 2, "heads": 4, "kernel": 9, "channels": 8, "vocabulary": 30}
BANDS, RATE, SEEN = 80, 16000, 25  # every 25th frame is compared
FLOOR, MEAN, SCALE = 1e-9, -10.0, 4.75  # of the log-mel, as ours


def sizes(tiny: bool) -> dict[str, int]:
    return TINY if tiny else SIZES


class Stem(nn.Module):
    """Subsampling by 8: strided convolutions, separable from the second on, and a projection."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, 2, 1)
        self.depthwise = nn.ModuleList(nn.Conv2d(channels, channels, 3, 2, 1, groups=channels) for _ in range(2))
        self.pointwise = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.project = nn.Linear(channels * BANDS // 8, width)

    def forward(self, features: Tensor) -> Tensor:
        x = F.relu(self.first(features[:, None]))
        for depthwise, pointwise in zip(self.depthwise, self.pointwise, strict=True):
            x = F.relu(pointwise(depthwise(x)))
        return self.project(x.transpose(1, 2).flatten(2))


class CudaConformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, kernel: int, channels: int, vocabulary: int):
        super().__init__()
        from torchaudio.models import Conformer

        self.stem = Stem(width, channels)
        self.encoder = Conformer(width, heads, 4 * width, layers, kernel)
        self.ctc = nn.Linear(width, vocabulary + 1)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        return self.ctc(self.encoder(self.stem(features), lengths)[0])


def prepare(folder: Path, device: str, batch: int, seconds: float, tiny: bool = False) -> None:
    """`recognizer.safetensors`, and `waves.safetensors`: noise [B samples]."""
    torch.manual_seed(0)
    save_file(CudaConformer(**sizes(tiny)).state_dict(), folder / "recognizer.safetensors")
    save_file({"waves": 0.1 * torch.randn(batch, round(seconds * RATE))}, folder / "waves.safetensors")


def waves(folder: Path, device: str) -> Tensor:
    return load_file(folder / "waves.safetensors")["waves"].to(device)


def recognizer(
    folder: Path, device: str, batch: int, seconds: float, kind: str, compiled: bool = False, tiny: bool = False
) -> Callable[[], Tensor]:
    """Compute the best path's tokens; return some of the logits."""
    from torchaudio.transforms import MelSpectrogram

    dtype, audio = getattr(torch, kind), waves(folder, device)
    model = CudaConformer(**sizes(tiny)).eval().requires_grad_(False)
    model.load_state_dict(load_file(folder / "recognizer.safetensors"))
    model = model.to(device, dtype)
    called = torch.compile(model) if compiled else model
    mel = MelSpectrogram(RATE, 512, 400, 160, n_mels=BANDS, norm="slaney", mel_scale="slaney", center=False).to(device)
    side = (512 - 400) // 2  # its window is centred in the 512 samples

    @torch.inference_mode()
    def run() -> Tensor:
        features = (mel(F.pad(audio, (side, side))).clamp(min=FLOOR).log().transpose(1, 2) - MEAN) / SCALE
        frames = -(-features.shape[1] // 8)
        logits = called(features.to(dtype), torch.full((len(audio),), frames, device=device))
        rows = [row.unique_consecutive() for row in logits.argmax(-1).cpu()]
        assert all(len(row[row != logits.shape[-1] - 1]) <= frames for row in rows)
        return logits[:, ::SEEN].float()

    return ready(run, device)
