"""Windows of log-mel frames: transformers' for Qwen2-Audio and Voxtral."""

import pytest
import torch

from multimodal.errors import AudioError
from multimodal.tokens.audio.log_mel import WHISPER_SAMPLES, log_mel_windows

SHORT = 4800  # samples of a window in these tests: 30 frames


def tone(samples: int) -> torch.Tensor:
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(samples))
    return 0.1 * noise * torch.linspace(0.01, 1, samples)  # each window has another maximum


def features(wave: torch.Tensor, window: int, **options):
    from transformers import WhisperFeatureExtractor

    theirs = WhisperFeatureExtractor(feature_size=128, chunk_length=window // 16000 or 1)
    theirs.n_samples = window
    return theirs(wave.numpy(), sampling_rate=16000, return_attention_mask=True, return_tensors="pt", **options)


@pytest.mark.parametrize("samples", [161, 4000, 4799, 4800])
def test_one_window_with_its_length_as_qwen2_audio_takes_it(samples):
    wave = tone(samples)
    expected = features(wave, SHORT, padding="max_length")
    mel, lengths = log_mel_windows(wave, 128, SHORT)
    assert (mel - expected["input_features"]).abs().max() <= 1e-5
    assert lengths.tolist() == expected["attention_mask"].sum(1).tolist()


@pytest.mark.parametrize("samples", [4000, 4801, 15000])
def test_windows_share_the_maximum_as_in_voxtral(samples):
    wave = tone(samples)
    options = {"padding": True, "truncation": False, "pad_to_multiple_of": SHORT}
    expected = features(wave, SHORT, **options)["input_features"][0].unflatten(1, (-1, SHORT // 160)).transpose(0, 1)
    mel, lengths = log_mel_windows(wave, 128, SHORT)
    assert mel.shape == expected.shape
    assert (mel - expected).abs().max() <= 1e-5
    assert lengths.sum() == -(-samples // 160)


def test_30_seconds_are_3000_frames():
    mel, lengths = log_mel_windows(tone(WHISPER_SAMPLES + 1))
    assert mel.shape == (2, 128, 3000)
    assert lengths.tolist() == [3000, 1]
    with pytest.raises(AudioError, match="no samples"):
        log_mel_windows(torch.zeros(0))
