"""Zero-shot classification as in open_clip's README. Each run takes images as `form` says (arrays, PIL images, JPEG
files) and returns the probabilities of `LABELS`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.peers.vision import clip_jpegs, openclip

LABELS = (
    "a dog",
    "a cat",
    "a ship",
    "a person in uniform",
    "a mountain lake",
    "a street at night",
    "food",
    "a diagram",
)
SIZE = (533, 400)
Probabilities = list[list[float]]


def prepare(folder: Path, device: str, name: str, count: int, tiny: bool = False, **other: Any) -> None:
    """Weights, and `count` JPEG files."""
    openclip.prepare(folder, device, name, tiny=tiny)
    clip_jpegs.prepare(folder, device, count, SIZE)


def inputs(folder: Path, form: str) -> list[Any]:
    paths = clip_jpegs.files(folder)
    if form == "files":
        return paths
    images = [Image.open(path).convert("RGB") for path in paths]
    return [np.asarray(image) for image in images] if form == "arrays" else images


def open_clip(
    folder: Path, device: str, name: str, form: str, tiny: bool = False, **other: Any
) -> Callable[[], Probabilities]:  # fmt: skip
    import torch
    from open_clip import get_tokenizer
    from open_clip.transform import PreprocessCfg, image_transform_v2

    model = openclip.loaded(folder, name, tiny).to(device)
    preprocess = image_transform_v2(PreprocessCfg(size=(224, 224)), is_train=False)
    opened: dict[str, Callable[[Any], Any]] = {"arrays": Image.fromarray, "files": Image.open, "images": lambda i: i}
    with torch.no_grad():
        texts = model.encode_text(get_tokenizer(name)(LABELS).to(device), normalize=True)
    images: Sequence[Any] = inputs(folder, form)

    @torch.no_grad()
    def run() -> Probabilities:
        pixels = torch.stack([preprocess(opened[form](image)) for image in images]).to(device)
        found = model.encode_image(pixels, normalize=True)
        return (model.logit_scale.exp() * found @ texts.T).softmax(-1).tolist()

    return run
