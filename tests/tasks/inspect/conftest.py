"""Files of the inspect tests."""

import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from multimodal.weights.folder import save_folder
from tests.helpers.tiny_checkpoints import checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """An image, half a second of sound, and checkpoint folders."""
    folder = tmp_path_factory.mktemp("inspect")
    pixels = np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes((np.sin(np.arange(8000) / 20) * 8000).astype("<i2").tobytes())
    found = {"image": folder / "a.png", "sound": folder / "a.wav"}
    for kind in ("rotary", "learned", "text-to-text", "captioner", "joint", "clip", "vit"):
        save_folder(checkpoint(kind), folder / kind)
        found[kind] = folder / kind
    return found
