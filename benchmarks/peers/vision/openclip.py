"""open_clip: random models that all libraries share, and its encoders."""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TINY = {
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 768, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 2},
}
BATCH = 256  # texts at once


def sizes(tiny: bool) -> dict[str, Any]:
    return TINY if tiny else {}


def made(name: str, tiny: bool = False) -> nn.Module:
    """The model as open_clip initializes it."""
    logging.disable(logging.WARNING)  # it warns about missing pretrained weights
    import open_clip

    return open_clip.create_model(name, **sizes(tiny)).eval().requires_grad_(False)


def loaded(folder: Path, name: str, tiny: bool = False) -> nn.Module:
    model = made(name, tiny)
    model.load_state_dict(load_file(folder / "open_clip.safetensors"))
    return model


def prepare(folder: Path, device: str, name: str, batch: int = 1, tiny: bool = False) -> None:
    """`open_clip.safetensors`, and `pixels.safetensors` of normalized noise."""
    torch.manual_seed(0)
    save_file({key: value.contiguous() for key, value in made(name, tiny).state_dict().items()},
              folder / "open_clip.safetensors")  # fmt: skip
    save_file({"pixels": torch.randn(batch, 3, 224, 224)}, folder / "pixels.safetensors")


def prepare_prompts(folder: Path, device: str, name: str, count: int, tiny: bool = False) -> None:
    """`open_clip.safetensors`, and `prompts.json`: `count` of CLIP's templates filled with ImageNet's names."""
    prepare(folder, device, name, tiny=tiny)
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES, OPENAI_IMAGENET_TEMPLATES

    pairs = [(template, name) for template in OPENAI_IMAGENET_TEMPLATES for name in IMAGENET_CLASSNAMES]
    drawn = random.Random(0).sample(pairs, count)
    (folder / "prompts.json").write_text(json.dumps([template(name) for template, name in drawn]))


def pixels(folder: Path, device: str) -> Tensor:
    return load_file(folder / "pixels.safetensors")["pixels"].to(device)


def encoder(folder: Path, device: str, name: str, batch: int, tiny: bool = False) -> Callable[[], Tensor]:
    model, images = loaded(folder, name, tiny).to(device), pixels(folder, device)
    return torch.inference_mode()(lambda: model.encode_image(images))


def texts(folder: Path, device: str, name: str, count: int, tiny: bool = False) -> Callable[[], Tensor]:
    """Tokenize and encode as in open_clip's documentation."""
    model, prompts = loaded(folder, name, tiny).to(device), json.loads((folder / "prompts.json").read_text())
    from open_clip import tokenize

    parts = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
    return torch.inference_mode()(lambda: torch.cat([model.encode_text(tokenize(part).to(device)) for part in parts]))
