"""Our frames of a long video."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.peers.ask.video import FRAMES, STEP, Colours
from multimodal.tokens.video.options import VideoOptions
from multimodal.tokens.video.reading import frames


def sampled(folder: Path, device: str) -> Callable[[], Colours]:
    path, options = folder / "video.mp4", VideoOptions(max_frames=FRAMES)
    return lambda: [np.asarray(one.image)[::STEP, ::STEP].mean((0, 1)).tolist() for one in frames(path, options)]
