"""Input of speech encoders: features of several waveforms by the name that a model's configuration gives."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.audio.log_mel import BANK_FFT, HOP, WINDOW, filterbank_batch, mel_power

PREEMPHASIS = 0.97
NORMALIZED_FLOOR = 2.0**-24
EPSILON = 1e-5


def speech_features(
    kind: str, waves: list[Float[Tensor, "_"]], bands: int
) -> tuple[Float[Tensor, "B F *M"], Int[Tensor, "B"]]:
    """Features of several waveforms and their lengths; padding is zero. Each row equals the waveform's own.

    `kind`: `fixed`, see `log_mel.filterbank`; `normalized`, see `normalized_filterbank`; `wave` and `normalized_wave`,
    samples. Raises AudioError for empty audio, UsageError for another kind."""
    if kind not in KINDS:
        raise UsageError(f"features: expected one of {', '.join(KINDS)} (got {kind!r})")
    return KINDS[kind](waves, bands)


def _padded(waves: list[Tensor], least: int) -> tuple[Float[Tensor, "B T"], Int[Tensor, "B"]]:
    for number, wave in enumerate(waves):
        if wave.ndim != 1 or not wave.numel():
            raise AudioError(f"waveform {number}: no samples in one dimension (shape {tuple(wave.shape)})")
    longest = max(least, *(wave.numel() for wave in waves))
    rows = torch.stack([F.pad(wave.float(), (0, longest - wave.numel())) for wave in waves])
    return rows, torch.tensor([max(wave.numel(), least) for wave in waves], device=rows.device)


def normalized_filterbank(
    waves: list[Float[Tensor, "_"]], bands: int = 80
) -> tuple[Float[Tensor, "B F M"], Int[Tensor, "B"]]:
    """NeMo's features: pre-emphasis, ln mel power of centred windows, and each band normalized over its recording
    (AudioToMelSpectrogramPreprocessor, `normalize: per_feature`). F = ⌊T / 160⌋; audio under 20 ms is zero-padded."""
    rows, lengths = _padded(waves, 2 * HOP)  # a deviation needs two frames
    inside = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    rows = torch.cat([rows[:, :1], rows[:, 1:] - PREEMPHASIS * rows[:, :-1]], 1) * inside
    power = mel_power(F.pad(rows, (WINDOW // 2, WINDOW // 2)), bands, BANK_FFT, periodic=False)
    log, frames = (power + NORMALIZED_FLOOR).log(), lengths // HOP
    counted = (torch.arange(log.shape[1], device=log.device) < frames[:, None])[..., None]
    mean = (log * counted).sum(1, keepdim=True) / frames[:, None, None]
    variance = ((log - mean) * counted).square().sum(1, keepdim=True) / (frames - 1)[:, None, None]
    made = torch.where(counted, (log - mean) / (variance.sqrt() + EPSILON), 0.0)
    return made[:, : int(frames.max())].contiguous(), frames


def plain_waves(waves: list[Float[Tensor, "_"]], bands: int = 0) -> tuple[Float[Tensor, "B T"], Int[Tensor, "B"]]:
    """Samples as they are."""
    return _padded(waves, 1)


def normalized_waves(waves: list[Float[Tensor, "_"]], bands: int = 0) -> tuple[Float[Tensor, "B T"], Int[Tensor, "B"]]:
    """Samples of each recording with mean 0 and variance 1, as wav2vec 2.0's `do_normalize`."""
    rows = [(wave - wave.mean()) / (wave.var(correction=0) + 1e-7).sqrt() if len(wave) else wave for wave in waves]
    return _padded(rows, 1)


KINDS = {
    "fixed": filterbank_batch, "normalized": normalized_filterbank, "wave": plain_waves,
    "normalized_wave": normalized_waves,
}  # fmt: skip
