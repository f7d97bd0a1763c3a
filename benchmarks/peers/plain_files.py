"""What preparations wrote, read without torch: a peer that needs none holds none then, as its users' processes."""

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
    """Those of `text_random`."""
    from safetensors.numpy import load_file

    found = load_file(folder / "ids.safetensors")
    return [found[name].tolist() for name in sorted(found)]
