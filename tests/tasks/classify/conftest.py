"""Images of the classify tests."""

from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten noisy images in two folders."""
    for number in range(10):
        path = tmp_path / "in" / f"part{number // 5}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 40), 50).convert("RGB").save(path)
    return tmp_path / "in"
