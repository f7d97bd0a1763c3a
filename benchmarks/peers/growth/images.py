"""The images and labels of `random_clip`, and scores in one order."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.vision import clip_jpegs

TEMPLATE = "a photo of a {}."


def files(folder: Path) -> list[str]:
    return [str(path) for path in clip_jpegs.files(folder / "pictures")]


def labels(folder: Path) -> list[str]:
    return json.loads((folder / "labels.json").read_text())


def in_order(found: Sequence[Sequence[dict[str, Any]]], names: Sequence[str]) -> Any:
    """Scores [images, labels] of lists of {"label", "score"}."""
    import numpy as np

    rows = [{one["label"]: one["score"] for one in scores} for scores in found]
    return np.array([[row[name] for name in names] for row in rows])
