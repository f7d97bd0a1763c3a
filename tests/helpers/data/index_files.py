"""Makers of images for an index."""

import os
from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(values).resize((40, 40), Image.Resampling.BICUBIC).save(path, "PNG")
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)
