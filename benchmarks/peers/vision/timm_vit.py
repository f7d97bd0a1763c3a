"""timm's image tower with open_clip's weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.peers.cuda.common import ready
from benchmarks.peers.vision.openclip import pixels

NAMES = {"ViT-B-16": "vit_base_patch16_clip_224", "ViT-L-14": "vit_large_patch14_clip_224"}


def loaded(folder: Path, name: str, tiny: bool = False) -> nn.Module:
    """Its classes are the embedding's dimensions."""
    import timm
    from timm.models.vision_transformer import checkpoint_filter_fn

    weights = load_file(folder / "open_clip.safetensors")
    sizes = {"depth": 2} if tiny else {}
    model = timm.create_model(NAMES[name], num_classes=weights["visual.proj"].shape[1], **sizes)
    model.load_state_dict(checkpoint_filter_fn(weights, model))
    return model.eval().requires_grad_(False)


def encoder(
    folder: Path, device: str, name: str, kind: str, compiled: bool = False, graph: bool = False, tiny: bool = False,
    **other: Any,
) -> Callable[[], Tensor]:  # fmt: skip
    dtype = getattr(torch, kind)
    model, images = loaded(folder, name, tiny).to(device, dtype), pixels(folder, device)
    model = torch.compile(model) if compiled else model
    return ready(torch.inference_mode()(lambda: model(images.to(dtype))), device, graph)
