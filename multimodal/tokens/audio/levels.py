"""Levels of an audio file: peak, clipping, and the subtracted DC offset."""

import numpy as np
from jaxtyping import Float32

SILENT = 0.5 / 32768  # half a 16-bit step
QUIET = 0.01  # -40 dB of full scale, where the small shipped models begin to lose words
FULL_SCALE = 0.999
CLIPPED = 0.1  # share of the samples at full scale; a sine of full scale has 0.03


class Levels:
    """Levels over all channels, updated per chunk."""

    def __init__(self) -> None:
        self.peak = self.offset = 0.0
        self.samples = self.clipped = 0

    def push(self, raw: Float32[np.ndarray, "C n"], sound: Float32[np.ndarray, "C n"]) -> None:
        """`raw`: as decoded. `sound`: without the offset."""
        top = max(float(raw.max()), -float(raw.min()))
        self.samples += raw.size
        if top >= FULL_SCALE:
            self.clipped += int((np.abs(raw) >= FULL_SCALE).sum())
        if sound is not raw:
            self.offset = max(self.offset, float((raw[:, 0] - sound[:, 0]).max()), key=abs)
            self.offset = max(self.offset, float((raw[:, 0] - sound[:, 0]).min()), key=abs)
            top = float(np.abs(sound).max())
        self.peak = max(self.peak, top)

    @property
    def silent(self) -> bool:
        return self.peak <= SILENT

    def remarks(self) -> list[str]:
        lines = []
        if self.offset:
            lines.append(f"a DC offset of {self.offset:.3g} of full scale is subtracted")
        if self.clipped > CLIPPED * self.samples:
            lines.append(f"clipped, {self.clipped / self.samples:.0%} of the samples are at full scale")
        if self.silent:
            lines.append("silent, no sample above half a 16-bit step")
        elif self.peak < QUIET:
            lines.append(f"very quiet, its peak is {self.peak:.2g} of full scale")
        return lines
