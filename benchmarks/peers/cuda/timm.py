"""timm's image towers on a GPU, all in one type and compiled."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.cuda.common import ready
from benchmarks.peers.vision.openclip import pixels
from benchmarks.peers.vision.timm_vit import loaded


def encoder(
    folder: Path, device: str, name: str, batch: int, kind: str, compiled: bool = False, graph: bool = False,
    tiny: bool = False,
) -> Callable[[], Tensor]:  # fmt: skip
    """Weights and pixels in one type."""
    dtype = getattr(torch, kind)
    model, images = loaded(folder, name, tiny).to(device, dtype), pixels(folder, device).to(dtype)
    model = torch.compile(model) if compiled else model

    @torch.inference_mode()
    def run() -> Tensor:
        return model(images)

    return ready(run, device, graph)
