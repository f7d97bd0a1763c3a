"""transformers' pipeline from picture files and labels to scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.growth_pictures import TEMPLATE, files, in_order, labels


def scores(folder: Path, device: str, **_: Any) -> Callable[[], Any]:
    """The pipeline as its documentation has it. It encodes the texts anew for each picture, and takes the first picture
    of a batch for all, so it gets one at a time."""
    from transformers import pipeline

    pipe = pipeline("zero-shot-image-classification", str(folder / "hub"), device=device)
    names, pictures = labels(folder), files(folder)

    def run() -> Any:
        """[pictures, labels]"""
        return in_order(pipe(pictures, candidate_labels=names, hypothesis_template=TEMPLATE), names)

    return run
