"""Speech augmentation on log-mel frames, and batches of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.data.batching import pad_text, padded_frames, zeros_of_batch
from multimodal.data.datasets.speech import SpeechFrames
from multimodal.errors import DataError
from multimodal.system.options import Natural, NonNegativeFloat, Rate, check_limits
from multimodal.tokens.audio.log_mel import BANK_FLOOR, BANK_MEAN, BANK_SCALE, RATE, mel_edges, spec_augment

FLOOR = (math.log(BANK_FLOOR) - BANK_MEAN) / BANK_SCALE  # the feature of digital silence


class SpeechBatch(NamedTuple):
    """Features [B F M], their lengths [B]; ids [B L], 0 past their lengths [B]. `sizes`, `id_sizes`: lengths on the
    host, where CTC needs them."""

    features: Tensor
    lengths: Tensor
    ids: Tensor
    id_lengths: Tensor
    sizes: list[int]
    id_sizes: list[int]

    @property
    def padding(self) -> float:
        """Share of padding among the frames."""
        return 1 - self.lengths.sum().item() / (self.features.shape[0] * self.features.shape[1])


@dataclass(frozen=True)
class SpeechAugmentation:
    """Augmentation of log-mel frames, which costs a hundredth of augmenting samples; 0: none."""

    speed: Rate = 0.1  # change of speed, up to this share
    warp: Rate = 0.0  # change of the frequencies, up to this share: longer and shorter vocal tracts
    channel: NonNegativeFloat = 0.0  # change of the spectrum's shape, up to this many dB: other microphones and rooms
    volume: NonNegativeFloat = 10.0  # change of volume, up to this many dB
    noise: NonNegativeFloat = 0.2  # share of utterances with noise of random tilt, 5 to 45 dB under the loud parts
    time_masks: NonNegativeFloat = 0.67  # SpecAugment time masks per second, up to 0.12 s and 5 % of the utterance
    freq_masks: Natural = 1  # SpecAugment frequency masks of up to `freq_width` bands
    freq_width: Natural = 15

    def __post_init__(self):
        check_limits(self)


def augment(features: Float[Tensor, "_ M"], a: SpeechAugmentation, random: torch.Generator) -> Float[Tensor, "_ M"]:
    """Change speed, frequencies, spectrum and volume, add noise, then apply SpecAugment (Park et al. 2019)."""
    pace, gain, noisy, level, tilt = torch.rand(5, generator=random).tolist()
    frames = max(1, round(len(features) * (1 + a.speed * (2 * pace - 1))))
    x = F.interpolate(features.T[None], size=frames, mode="linear", align_corners=False)[0].T
    if a.warp:
        x = warped(x, 1 + a.warp * (2 * torch.rand((), generator=random).item() - 1))
    if a.channel:
        x = x + spectral_curve(x.shape[1], random) * (a.channel * math.log(10) / 10 / BANK_SCALE)
    x = (x + a.volume * (2 * gain - 1) * math.log(10) / 10 / BANK_SCALE).clamp(min=FLOOR)
    if noisy < a.noise:
        # power of noise in a band varies as a mean of exponentials
        top = x.mean(1).quantile(0.9) * BANK_SCALE - (5 + 40 * level) * math.log(10) / 10
        slope = torch.linspace(1, -1, x.shape[1]) * (6 * tilt - 2)
        noise = top + slope + 0.5 * torch.randn(x.shape, generator=random)
        x = torch.logaddexp(x * BANK_SCALE, noise) / BANK_SCALE
    masks = max(1, int(frames * a.time_masks / 100)) if a.time_masks else 0
    longest = min(0.05, 12.5 / frames)  # half a frame above 12, which rounding down must not make 11
    return spec_augment(x, random, masks, longest, a.freq_masks, a.freq_width)


def warped(x: Float[Tensor, "F M"], factor: float) -> Float[Tensor, "F M"]:
    """Bands as of a vocal tract longer by `factor`: each shows what was at its frequency times `factor`. Above 4.8 kHz
    the change falls off to none at 8 kHz (Jaitly and Hinton 2013)."""
    bands = x.shape[1]
    centres = mel_edges(bands)[1:-1]
    knee, top = 4800 / max(factor, 1.0), RATE / 2
    above = top - (top - knee * factor) / (top - knee) * (top - centres)
    source = torch.where(centres <= knee, centres * factor, above)
    right = torch.searchsorted(centres, source).clamp(1, bands - 1)
    share = ((source - centres[right - 1]) / (centres[right] - centres[right - 1])).clamp(0, 1).float()
    return torch.lerp(x[:, right - 1], x[:, right], share)


def spectral_curve(bands: int, random: torch.Generator) -> Float[Tensor, "M"]:
    """A smooth curve within -1 to 1, drawn at six points."""
    points = 2 * torch.rand(1, 1, 6, generator=random) - 1
    return F.interpolate(points, size=bands, mode="linear", align_corners=True)[0, 0]


@dataclass(frozen=True)
class PrepareSpeech:
    """Augment an item with its own random generator. Raises DataError for a text longer than the model's context."""

    augmentation: SpeechAugmentation
    most_ids: int

    def __call__(self, item: SpeechFrames, random: torch.Generator) -> tuple[Tensor, list[int]]:
        if len(item.ids) > self.most_ids:
            raise DataError(f"{len(item.ids)} tokens, more than the {self.most_ids} of the model's context")
        return augment(item.features, self.augmentation, random) if item.augment else item.features, item.ids


def collate(items: Sequence[tuple[Float[Tensor, "_ M"], list[int]]]) -> SpeechBatch:
    """Batch pairs of features and ids, each padded to the longest."""
    features, lengths = stacked([row for row, _ in items])
    text = pad_text([ids for _, ids in items])
    return SpeechBatch(features, lengths, text.ids, text.lengths, lengths.tolist(), text.lengths.tolist())


def stacked(rows: Sequence[Float[Tensor, "_ M"]]) -> tuple[Float[Tensor, "B F M"], Int[Tensor, "B"]]:
    """Pad rows of frames with zeros; return them and their lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    features = zeros_of_batch(len(rows), padded_frames(int(lengths.max())), rows[0].shape[1])
    for place, row in zip(features, rows, strict=True):
        place[: len(row)] = row
    return features, lengths
