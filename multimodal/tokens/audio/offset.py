"""Removal of a DC offset, the constant that faulty sound cards add to every sample.

Over a second of clean speech the mean stays below 0.0005 of full scale. Audio without an offset passes unchanged, bit
for bit; only if the mean of a chunk exceeds `SIGNIFICANT` is the whole file measured.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
from jaxtyping import Float, Float32

from multimodal.errors import MultimodalError
from multimodal.tokens.audio.levels import Levels

SIGNIFICANT = 0.01
# Reduction of a second's mean by speech that the offset drives into clipping.
CLIPPED_SHARE = 0.25
# Wind and rumble also move the mean, but not for this long; an offset does, or lasts for the whole file.
LASTING_SECONDS = 3.0
Pieces = Iterable[tuple[int, Float32[np.ndarray, "C n"]]]  # (rate, samples) of about one second each


def without_offset(
    pieces: Pieces, again: Callable[[], Pieces], levels: Levels
) -> Iterator[tuple[int, Float32[np.ndarray, "C n"]]]:
    """Subtract the offset of each channel. `again` reads the same chunks from the start, at most once."""
    offsets: list[np.ndarray] | None = None
    for number, (rate, sound) in enumerate(pieces):
        if offsets is None and (np.abs(sound.mean(axis=1)) > SIGNIFICANT).any():
            offsets = list(_measured(again()))
        clean = sound
        if offsets is not None and number < len(offsets) and offsets[number].any():
            clean = sound - offsets[number][:, None]
        levels.push(sound, clean)
        yield rate, clean


def _measured(pieces: Pieces) -> Iterator[Float32[np.ndarray, "C"]]:
    """Offset of each channel in each chunk."""
    means, sizes = [], []
    with suppress(MultimodalError):  # the first reading raises it too
        for rate, sound in pieces:
            means.append(sound.mean(axis=1, dtype=np.float64))
            sizes.append(sound.shape[1] / rate)
    start = 0
    while start < len(means):
        channels, stop = len(means[start]), start
        while stop < len(means) and len(means[stop]) == channels:
            stop += 1
        part = np.stack(means[start:stop], axis=1)
        tracks = [_levels(channel, np.array(sizes[start:stop])) for channel in part]
        yield from np.stack(tracks, axis=1).astype(np.float32)
        start = stop


def _levels(means: Float[np.ndarray, "p"], sizes: Float[np.ndarray, "p"]) -> Float[np.ndarray, "p"]:
    """Offset of each run of chunks with similar means; 0 if insignificant or too short."""
    levels, start = np.zeros(len(means)), 0
    while start < len(means):
        stop, level = start + 1, means[start]
        while stop < len(means) and (_agree(means[stop], level) or (stop == len(means) - 1 and sizes[stop] < 0.5)):
            stop += 1
            level = np.average(means[start:stop], weights=sizes[start:stop])
        if abs(level) > SIGNIFICANT and sizes[start:stop].sum() >= min(LASTING_SECONDS, sizes.sum()):
            levels[start:stop] = level
        start = stop
    return levels


def _agree(mean: float, level: float) -> bool:
    return bool(abs(mean - level) <= SIGNIFICANT + CLIPPED_SHARE * abs(level))


class LiveOffset:
    """Offset removal in a live stream: the mean of the past."""

    MEASURED_SECONDS, STEADY_SECONDS = 0.1, 10.0

    def __init__(self, rate: int):
        self.rate, self.level, self.seconds = rate, 0.0, 0.0
        self.total, self.count = 0.0, 0  # since the level was last set

    def push(self, block: Float32[np.ndarray, "n"]) -> Float32[np.ndarray, "n"]:
        self.total += float(block.sum(dtype=np.float64))
        self.count += len(block)
        if self.count >= self.MEASURED_SECONDS * self.rate:
            self._measure(self.total / self.count, self.count / self.rate)
            self.total, self.count = 0.0, 0
        return block - np.float32(self.level) if abs(self.level) > 2 * SIGNIFICANT else block

    def _measure(self, mean: float, seconds: float) -> None:
        if abs(mean - self.level) > 2 * SIGNIFICANT + CLIPPED_SHARE * abs(self.level):
            self.level, self.seconds = mean, 0.0
        self.seconds = min(self.seconds + seconds, self.STEADY_SECONDS)
        self.level += (mean - self.level) * min(1.0, seconds / self.seconds)
