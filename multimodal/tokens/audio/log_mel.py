"""Audio features: Whisper's log-mel spectrogram, the Conformer's filterbank, and SpecAugment.

Both features share the mel scale (Slaney's, as in librosa) and framing; they differ in padding and normalization. Audio
is mono at 16 kHz, with 25 ms windows (400 samples) and 10 ms hops (160).
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multimodal.errors import AudioError, UsageError
from multimodal.system.memory import keep_freed_memory

RATE = 16000
WINDOW = 400
HOP = 160
WHISPER_SAMPLES = 30 * RATE

# The filterbank zero-pads its window to 512 points: bins of 31 Hz leave no mel band empty at 80 bands.
BANK_FFT = 512
# Just above the power of 16-bit rounding in a band, so that digital silence looks like a quiet room.
BANK_FLOOR = 1e-9
# Mean and deviation of ln(power) over LJSpeech. Fixed, so that a live stream gives the same frames as the whole file.
BANK_MEAN = -10.0
BANK_SCALE = 4.75

# Frames per block: with one thread the spectrum stays in the CPU's cache (2.5 times faster than all at once); several
# threads synchronise after each operation, so their blocks are larger.
BLOCK_FRAMES = 1024
BLOCK_FRAMES_SHARED = 4096  # a thread
BLOCK_FRAMES_DEVICE = 1 << 20  # on an accelerator: 1.7 GB of frames
BAND_GROUPS = 5  # on a CPU: neighbouring bands share few bins, so most of the whole product would be with zeros


def mel_edges(bands: int) -> Float[Tensor, "edges"]:
    """Edges of triangular filters in Hz: filter i rises from edge i to i + 1 and falls to i + 2."""
    top = 15 + 27 * math.log(RATE / 2 / 1000) / math.log(6.4)
    mels = torch.linspace(0, top, bands + 2, dtype=torch.float64, device="cpu")
    return torch.where(mels < 15, mels * 200 / 3, 1000 * torch.exp((mels - 15) * math.log(6.4) / 27))


@lru_cache(maxsize=8)
def mel_filters(bands: int, fft: int) -> Float[Tensor, "M bins"]:
    """Triangular filters on Slaney's mel scale from 0 to 8 kHz, each of unit area (librosa.filters.mel).

    The scale is linear (3 mel per 200 Hz) up to 1 kHz = 15 mel, then logarithmic, 27 mel per factor 6.4.
    """
    if bands < 1:
        raise UsageError(f"bands: must be at least 1 (got {bands})")
    edges = mel_edges(bands)
    bins = torch.linspace(0, RATE / 2, fft // 2 + 1, dtype=torch.float64, device="cpu")
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rise, fall = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return (torch.minimum(rise, fall).clamp(min=0) * 2 / (high - low)).float()


@lru_cache(maxsize=8)
def _on_device(
    bands: int, fft: int, device: torch.device, periodic: bool
) -> tuple[Float[Tensor, "W"], list[tuple[int, Tensor]]]:
    """Window and filters on a device, the latter as groups of bands with their first bin; cached, since copies stall a
    GPU."""
    keep_freed_memory()
    with torch.inference_mode(False):  # the cache must be usable outside inference mode
        window = torch.hann_window(WINDOW, periodic, dtype=torch.float32, device=device)
        whole, groups = mel_filters(bands, fft), []
        if device.type != "cpu":
            return window, [(0, whole.T.contiguous().to(device))]
        for filters in whole.chunk(BAND_GROUPS):
            used = filters.any(0).nonzero()[:, 0].tolist() or [0]
            groups.append((used[0], filters[:, used[0] : used[-1] + 1].T.contiguous()))
        return window, groups


def mel_power(
    wave: Float[Tensor, "... T"], bands: int, fft: int, periodic: bool = True
) -> Float[Tensor, "... F M"]:  # fmt: skip
    """Mel power of every whole window in `wave`: ⌊(T − 400) / 160⌋ + 1 frames, computed in blocks. `periodic`: kind of
    Hann window."""
    window, groups = _on_device(bands, fft, wave.device, periodic)
    threads, blocks = torch.get_num_threads(), []
    size = BLOCK_FRAMES if threads == 1 else threads * BLOCK_FRAMES_SHARED
    size = size if wave.device.type == "cpu" else BLOCK_FRAMES_DEVICE
    for frames in wave.unfold(-1, WINDOW, HOP).split(size, dim=-2):
        spectrum = torch.fft.rfft(frames * window, n=fft)
        power = spectrum.real.square().addcmul_(spectrum.imag, spectrum.imag)
        parts = [power[..., first : first + len(filters)] @ filters for first, filters in groups]
        blocks.append(_joined(parts, -1))
    return _joined(blocks, -2)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """`torch.cat`, which copies a single part too."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def log10_mel(wave: Float[Tensor, "... T"], bands: int = 80) -> Float[Tensor, "... M F"]:
    """log10 of the mel power of every whole window in `wave`, at least -10."""
    return mel_power(wave, bands, WINDOW).clamp_(min=1e-10).log10_().transpose(-1, -2)


def scaled_mel(log: Float[Tensor, "... M F"], peak: Float[Tensor, "... 1 1"] | float) -> Float[Tensor, "... M F"]:
    """`log10_mel` clamped to 8 decades below the recording's `peak`, scaled to about [-1, 1]."""
    return log.clamp(min=peak - 8).add_(4).div_(4)


def log_mel(wave: Float[Tensor, "... T"], bands: int = 80) -> Float[Tensor, "... M F"]:
    """Whisper's input: log10 mel power, clamped to 8 decades below its maximum, scaled to about [-1, 1].

    F = ⌊T / 160⌋ (the last centred frame is dropped). Equal to openai-whisper's `log_mel_spectrogram`, but each
    waveform of a batch has its own maximum, so the result does not depend on the batch. Raises AudioError for T ≤ 200
    samples.
    """
    if wave.shape[-1] <= WINDOW // 2:
        raise AudioError(f"waveform: too short for one mel frame ({wave.shape[-1]} samples)")
    flat = wave.float().reshape(-1, 1, wave.shape[-1])
    padded = F.pad(flat, (WINDOW // 2, WINDOW // 2), mode="reflect").squeeze(1)
    log = log10_mel(padded, bands)[..., : wave.shape[-1] // HOP]
    return scaled_mel(log, log.amax(dim=(-2, -1), keepdim=True)).reshape(*wave.shape[:-1], bands, -1)


def pad_or_trim(wave: Float[Tensor, "... T"], length: int = WHISPER_SAMPLES) -> Float[Tensor, "... L"]:
    """The first `length` samples, zero-padded: Whisper's encoder takes exactly 30 s."""
    return F.pad(wave[..., :length], (0, max(0, length - wave.shape[-1])))


def log_mel_windows(
    wave: Float[Tensor, "T"], bands: int = 128, samples: int = WHISPER_SAMPLES
) -> tuple[Float[Tensor, "N M F"], Int[Tensor, "N"]]:
    """`log_mel` of a waveform padded with silence to whole windows of `samples`, and the frames that are not padding in
    each window. All windows share the recording's maximum, as in Voxtral (Liu et al. 2025). Raises AudioError for empty
    audio."""
    if not wave.numel():
        raise AudioError("waveform: no samples")
    count = -(-wave.shape[-1] // samples)
    mel = log_mel(pad_or_trim(wave, count * samples), bands)
    frames = samples // HOP
    heard = -(-wave.shape[-1] // HOP) - frames * torch.arange(count, device="cpu")
    return mel.unflatten(-1, (count, frames)).transpose(0, 1), heard.clamp(max=frames)


def frame_count(samples: int) -> int:
    """Number of `filterbank` frames, at least one."""
    return max(samples - WINDOW, 0) // HOP + 1


def filterbank(wave: Float[Tensor, "T"], bands: int = 80) -> Float[Tensor, "F M"]:
    """The Conformer's input: ln mel power with a floor and a fixed shift and scale, about N(0, 1) on speech.

    F = ⌊(T − 400) / 160⌋ + 1; frame f depends on samples [160 f, 160 f + 400) only, so a stream gives the frames of the
    whole. Digital silence is about -2.3. Audio under 25 ms is zero-padded to one frame. Window and hop follow the
    Conformer paper (Gulati et al. 2020). Raises AudioError for empty audio.
    """
    return filterbank_batch([wave], bands)[0][0]


def filterbank_batch(waves: list[Tensor], bands: int = 80) -> tuple[Float[Tensor, "B F M"], Int[Tensor, "B"]]:
    """`filterbank` of several waveforms and their lengths in frames; padding frames are zero. Each row equals the
    waveform's own `filterbank`."""
    if not waves:
        raise UsageError("waves: must not be empty (got 0)")
    empty = [i for i, wave in enumerate(waves) if wave.ndim != 1 or not wave.numel()]
    if empty:
        raise AudioError(f"waveform {empty[0]}: no samples in one dimension (shape {tuple(waves[empty[0]].shape)})")
    padded = pad_sequence([wave.float() for wave in waves], batch_first=True)
    if padded.shape[1] < WINDOW:
        padded = F.pad(padded, (0, WINDOW - padded.shape[1]))
    counts = [frame_count(wave.numel()) for wave in waves]
    lengths = torch.tensor(counts, device=padded.device)
    rows = mel_power(padded, bands, BANK_FFT).clamp_(min=BANK_FLOOR).log_().sub_(BANK_MEAN).div_(BANK_SCALE)
    if min(counts) < rows.shape[1]:
        rows.masked_fill_((torch.arange(rows.shape[1], device=rows.device) >= lengths[:, None])[..., None], 0.0)
    return rows, lengths


def spec_augment(
    features: Float[Tensor, "F M"], generator: torch.Generator, time_masks: int | None = None,
    time_ratio: float = 0.05, freq_masks: int = 2, freq_width: int = 27, fill: float = 0.0,
) -> Float[Tensor, "F M"]:  # fmt: skip
    """Copy with random bands and time spans replaced by `fill` (SpecAugment, Park et al. 2019, without warping).

    Each frequency mask covers 0..`freq_width` bands, each time mask 0..`time_ratio`·F frames. `time_masks` defaults to
    ⌊0.05 F⌋ within 2..10 (Park et al. 2020). `generator`: on the CPU.
    """
    if time_ratio < 0 or time_ratio > 1 or freq_width < 0 or freq_masks < 0 or (time_masks or 0) < 0:
        wrong = (time_masks, time_ratio, freq_masks, freq_width)
        raise UsageError(f"spec_augment: time_masks, time_ratio, freq_masks, freq_width out of range {wrong}")
    frames, bands = features.shape
    if time_masks is None:
        time_masks = min(10, max(2, int(0.05 * frames)))

    def covered(size: int, masks: int, width: int) -> Tensor:
        widths, places = torch.rand(2, masks, 1, dtype=torch.float32, generator=generator)
        widths = (widths * (min(width, size) + 1)).floor()
        starts = (places * (size - widths + 1)).floor()
        at = torch.arange(size)
        return ((at >= starts) & (at < starts + widths)).any(dim=0)

    hidden_bands = covered(bands, freq_masks, freq_width)
    hidden_frames = covered(frames, time_masks, int(time_ratio * frames))
    hidden = hidden_frames[:, None] | hidden_bands
    return features.masked_fill(hidden.to(features.device), fill)
