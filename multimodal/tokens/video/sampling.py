"""Times at which frames are taken: on a grid, or where scenes begin."""

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from multimodal.tokens.video.options import EVENLY, VideoOptions

THUMBNAIL = 32  # pixels each way, for colours
LEVELS = 4  # of each colour channel in a histogram


class Grid(NamedTuple):
    """`count` times from `first` on, `step` apart (seconds)."""

    first: float
    step: float
    count: float

    def next(self, time: float) -> float | None:
        """The first wanted time that is not before `time`; None: no more."""
        place = max(0, math.ceil((time - self.first) / self.step))
        return self.first + place * self.step if place < self.count else None


class Listed(NamedTuple):
    times: Sequence[float]

    def next(self, time: float) -> float | None:
        place = bisect_left(self.times, time)
        return self.times[place] if place < len(self.times) else None


Times = Grid | Listed


def grid(options: VideoOptions, start: float, duration: float | None) -> Grid:
    """The grid of `every_s` or of `max_frames` in a video of `duration` seconds from `start` on. Only `every_s`
    without `max_frames` can do without a duration."""
    every, most = options.every_s, options.max_frames
    if every is not None and (most is None or (duration or 0) <= every * most):
        return Grid(0.0, every, math.inf if most is None else most)
    most = most or EVENLY
    step = max(duration or 0.0, 1e-6) / most
    return Grid(start + step / 2, step, most)


def _colours(frame: Any, scaler: Any) -> Float[np.ndarray, "64"]:
    """Shares of 64 colours among the pixels of a frame, scaled down."""
    small = scaler.reformat(frame, THUMBNAIL, THUMBNAIL, "rgb24", interpolation="AREA").to_ndarray()
    bins = small.reshape(-1, 3) // (256 // LEVELS) @ np.array([LEVELS**2, LEVELS, 1])
    return np.bincount(bins, minlength=LEVELS**3) / len(bins)


def scene_times(frames: Iterable[tuple[float, Any]], least: float, most: int | None) -> Listed:
    """Times at which scenes begin: the first frame, and each whose colours differ from those of the frame that
    began the scene before by at least the share `least` (half the sum of absolute differences of histograms: 0 for the
    same colours, 1 for others only). A slow fade counts as well. Of more than `most` the greatest changes."""
    from av.video.reformatter import VideoReformatter

    found: list[tuple[float, float]] = []  # heap of (change, time)
    scaler = VideoReformatter()
    last = None
    for time, frame in frames:
        now = _colours(frame, scaler)
        change = math.inf if last is None else float(abs(now - last).sum() / 2)
        if change >= least:
            heapq.heappush(found, (change, time))
            last = now
        if most is not None and len(found) > most:
            heapq.heappop(found)
    return Listed(sorted(time for _, time in found))
