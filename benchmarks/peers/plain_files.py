"""Readers of prepared files without torch, for peers that do not need it."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.suite.process import ROOT

if TYPE_CHECKING:
    import numpy as np

TEXTS = ROOT.parent / "shared" / "data" / "text"


def array(folder: Path, file: str, name: str) -> "np.ndarray":
    from safetensors.numpy import load_file

    return load_file(folder / f"{file}.safetensors")[name]


def rows(folder: Path) -> list[list[int]]:
    """The rows of `random_models`."""
    from safetensors.numpy import load_file

    return [row.tolist() for _, row in sorted(load_file(folder / "ids.safetensors").items())]
