"""transformers' pipeline from image files and labels to scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.growth.images import TEMPLATE, files, in_order, labels


def scores(folder: Path, device: str, **_: Any) -> Callable[[], Any]:
    """The pipeline as documented, one image at a time: it encodes the texts for each image, and uses a batch's first
    image for all."""
    from transformers import pipeline

    pipe = pipeline("zero-shot-image-classification", str(folder / "hub"), device=device)
    names, pictures = labels(folder), files(folder)

    def run() -> Any:
        """[images, labels]"""
        return in_order(pipe(pictures, candidate_labels=names, hypothesis_template=TEMPLATE), names)

    return run
