"""Downmix to mono without cancelling channels, and streaming resampling.

The mean of the channels fails where they cancel: a microphone with swapped poles turns stereo speech into silence. So
each block of 0.1 s is checked: where the mean keeps less than a quarter of the power that uncorrelated channels would
(for a pair of equal power: correlation below -0.75), channels are first given the sign that aligns them with the
loudest one. Weights fade over 10 ms, and blocks lie on a fixed grid, so the result does not depend on the chunking.
Of a film's 5.1 channels the mean is FFmpeg's weighted one, without the bass.
"""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

if TYPE_CHECKING:
    from av import AudioLayout

BLOCK_SECONDS = 0.1
FADE_SECONDS = 0.01
CANCELLED = 0.25
TAPS = 32  # of libswresample's filter, in samples of the lower rate; it drops audio that is shorter


def shares_of(layout: "AudioLayout") -> Float32[np.ndarray, "C"] | None:
    """Share of each channel in FFmpeg's mono mix (-ac 1) of more than two channels: of 5.1 the centre 0.29, left and
    right 0.21, the surrounds 0.15, the bass 0. None for channels without places, such as microphones: equal shares."""
    import av

    count = layout.nb_channels
    if count <= 2 or any(channel.name == "NONE" for channel in layout.channels):
        return None
    units = np.eye(count, dtype=np.float32).reshape(1, -1) / 2
    frame = av.AudioFrame.from_ndarray(units, format="flt", layout=layout)
    frame.sample_rate = 16_000
    mixer = av.AudioResampler(format="s32", layout="mono", rate=16_000)  # integers: the shares add up to 1
    try:
        made = [one.to_ndarray()[0] for one in [*mixer.resample(frame), *mixer.resample(None)]]
    except (ValueError, av.error.FFmpegError):  # places that FFmpeg cannot mix
        return None
    return (np.concatenate(made) / 2**30).astype(np.float32)


class MonoMixer:
    """Mix a stream of (channels, samples) chunks; `flush` returns the last partial block."""

    def __init__(self, channels: int, rate: int, shares: Float32[np.ndarray, "C"] | None = None):
        self.block = max(1, round(BLOCK_SECONDS * rate))
        self.fade = max(1, round(FADE_SECONDS * rate))
        self.mean = np.full(channels, 1 / channels, np.float32) if shares is None else shares
        self.weights = self.mean
        self.waiting = np.zeros((channels, 0), np.float32)

    def mix(self, sound: Float32[np.ndarray, "C n"]) -> Float32[np.ndarray, "m"]:
        if len(sound) == 1:
            return sound[0]
        sound = np.concatenate([self.waiting, sound], axis=1)
        whole = sound.shape[1] // self.block * self.block
        self.waiting = sound[:, whole:]
        return self._mix_blocks(sound[:, :whole])

    def flush(self) -> Float32[np.ndarray, "m"]:
        rest, self.waiting = self.waiting, self.waiting[:, :0]
        return self._mix_block(rest) if rest.shape[1] else np.zeros(0, np.float32)

    def _mix_blocks(self, sound: Float32[np.ndarray, "C n"]) -> Float32[np.ndarray, "n"]:
        blocks = sound.reshape(len(sound), -1, self.block)
        mean = np.tensordot(self.mean, blocks, axes=1)
        power, kept = np.square(self.mean) @ np.square(blocks).mean(axis=2), np.square(mean).mean(axis=1)
        if self.weights is self.mean and not (kept < CANCELLED * power).any():
            return mean.reshape(-1)
        return np.concatenate([self._mix_block(blocks[:, i]) for i in range(blocks.shape[1])])

    def _mix_block(self, block: Float32[np.ndarray, "C n"]) -> Float32[np.ndarray, "n"]:
        before, self.weights = self.weights, self._choose(block)
        mixed = self.weights @ block
        if before is not self.weights:
            share = np.minimum(np.arange(1, block.shape[1] + 1, dtype=np.float32) / self.fade, 1)
            mixed = share * mixed + (1 - share) * (before @ block)
        return mixed

    def _choose(self, block: Float32[np.ndarray, "C n"]) -> Float32[np.ndarray, "C"]:
        gram = block @ block.T
        power, kept = np.square(self.mean) @ gram.diagonal(), self.mean @ gram @ self.mean
        if power == 0:
            return self.weights
        if kept >= CANCELLED * power:
            return self.mean
        signs = np.where(gram[gram.diagonal().argmax()] < 0, -1, 1).astype(np.float32)
        # Overall polarity is inaudible, but flipping it between blocks would fade through silence.
        weights = signs * self.mean if signs @ self.weights >= 0 else -signs * self.mean
        return self.weights if np.array_equal(weights, self.weights) else weights


class Resampler:
    """Streaming mono resampler (libswresample: Kaiser-windowed sinc). torchaudio's kernel grows with odd rate ratios
    and keeps no state."""

    def __init__(self, rate: int, target: int):
        import av

        self.rate, self.target, self.pushed, self.made = rate, target, 0, 0
        self.swr = av.AudioResampler(format="flt", layout="mono", rate=target) if rate != target else None

    def push(self, sound: Float32[np.ndarray, "n"]) -> Float32[np.ndarray, "m"]:
        import av

        if self.swr is None or not len(sound):
            return sound
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound[None]), format="flt", layout="mono")
        frame.sample_rate = self.rate
        self.pushed += len(sound)
        return self._joined(self.swr.resample(frame))

    def flush(self) -> Float32[np.ndarray, "m"]:
        """The rest, and all of audio that is shorter than the filter, as if silence followed."""
        if self.swr is None:
            return np.zeros(0, np.float32)
        count, least = self.pushed, TAPS * max(self.rate, self.target) // self.target + 1
        if not 0 < count < least:
            return self._joined(self.swr.resample(None))
        missing = -(-count * self.target // self.rate) - self.made
        silence = np.zeros(2 * least, np.float32)
        return np.concatenate([self.push(silence), self._joined(self.swr.resample(None))])[:missing]

    def _joined(self, frames: list) -> Float32[np.ndarray, "m"]:
        made = np.concatenate([np.zeros(0, np.float32), *(frame.to_ndarray()[0] for frame in frames)])
        self.made += len(made)
        return made
