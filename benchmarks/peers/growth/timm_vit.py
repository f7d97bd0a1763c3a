"""timm's ViTs of growing size, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.peers.vision.openclip import pixels


def prepare(folder: Path, device: str, name: str, args: dict[str, int], **_: Any) -> None:
    """`timm.safetensors`, and `pixels.safetensors` of one image of normalised noise."""
    import timm

    torch.manual_seed(0)
    save_file(timm.create_model(name, **args).state_dict(), folder / "timm.safetensors")
    save_file({"pixels": torch.randn(1, 3, 224, 224)}, folder / "pixels.safetensors")


def encoder(folder: Path, device: str, name: str, kind: str, args: dict[str, int], **_: Any) -> Callable[[], Tensor]:
    import timm

    dtype, model = getattr(torch, kind), timm.create_model(name, **args)
    model.load_state_dict(load_file(folder / "timm.safetensors"))
    model.eval().requires_grad_(False).to(device, dtype)
    images = pixels(folder, device)

    @torch.inference_mode()
    def run() -> Tensor:
        return model(images.to(dtype))

    return run
