"""Data of the evaluate tests."""

from pathlib import Path

import pytest

from tests.helpers.data.sets import COLOURS, lines, squares


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("data") / "val", 6)


@pytest.fixture(scope="module")
def captions(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    """Three images of each colour with two captions each."""
    rows = [
        {"file_name": f"val/{name}_square/{i}.png", "captions": [f"a {name} square {i}", f"number {i} is {name}"]}
        for name in COLOURS for i in range(3)
    ]  # fmt: skip
    return lines(images.parent / "captions.jsonl", rows)
