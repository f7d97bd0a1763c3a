"""JPEG files to normalized pixels by open_clip's transform (torchvision), and Pillow's decoder alone."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH, QUALITY = 32, 90


def prepare(folder: Path, device: str, count: int, size: tuple[int, int], data: str | None = None) -> None:
    """`count` JPEG files of `size` (wide; every second one tall): photos of Flickr8k in `data` at that size, else
    crops of matplotlib's sample photo."""
    from PIL import Image

    draw, turn = random.Random(0), Image.Transpose.ROTATE_90
    if data:
        found = sorted((Path(data) / "vision/flickr8k-1000/images").glob("*.jpg"))[:count]
    else:
        import matplotlib

        found = [Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"] * count
    for number, file in enumerate(found):
        with Image.open(file) as image:
            image = image.convert("RGB")
        if data:
            shape = size if image.width > image.height else size[::-1]
            image = image.resize(shape, Image.Resampling.BICUBIC)
        else:
            short, long = sorted(size)  # the photograph is tall
            left, top = draw.randrange(image.width - short), draw.randrange(image.height - long)
            image = image.crop((left, top, left + short, top + long))
            image = image if number % 2 else image.transpose(turn)
        image.save(folder / f"{number:03}.jpg", quality=QUALITY)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jpg"))


def open_clip(folder: Path, device: str) -> Callable[[], Any]:
    import torch
    from open_clip.transform import PreprocessCfg, image_transform_v2
    from PIL import Image

    transform, paths = image_transform_v2(PreprocessCfg(size=(224, 224)), is_train=False), files(folder)

    def run() -> torch.Tensor:
        parts = [paths[i : i + BATCH] for i in range(0, len(paths), BATCH)]
        return torch.cat([torch.stack([transform(Image.open(file)) for file in part]) for part in parts])

    return run


def decoder(folder: Path, device: str) -> Callable[[], list[int]]:
    """Decode every file; return the number of values."""
    from PIL import Image

    paths = files(folder)
    return lambda: [np.asarray(Image.open(path)).size for path in paths]
