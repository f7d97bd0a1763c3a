"""The levels of a whole audio file: its peak, how much is clipped, and the DC offset that was subtracted."""

import numpy as np
from jaxtyping import Float32

SILENT = 0.5 / 32768  # half a step of 16-bit samples: below it nothing can be heard
QUIET = 0.01  # -40 dB of full scale, where the small models here begin to lose words
FULL_SCALE = 0.999
CLIPPED = 0.1  # share of the samples at full scale; a sine of full scale has 0.03


class Levels:
    """Levels over all channels, one push for each piece."""

    def __init__(self):
        self.peak = self.offset = 0.0
        self.samples = self.clipped = 0

    def push(self, raw: Float32[np.ndarray, "C n"], sound: Float32[np.ndarray, "C n"]) -> None:
        """`raw`: as decoded. `sound`: the same without its offset."""
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
        found = []
        if self.offset:
            found.append(f"a DC offset of {self.offset:.3g} of full scale is subtracted")
        if self.clipped > CLIPPED * self.samples:
            found.append(f"clipped, {self.clipped / self.samples:.0%} of the samples are at full scale")
        if self.silent:
            found.append("silent, no sample above half a 16-bit step")
        elif self.peak < QUIET:
            found.append(f"very quiet, its peak is {self.peak:.2g} of full scale")
        return found
