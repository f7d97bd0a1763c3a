"""Augmentation of log-mel frames."""

from dataclasses import replace

import pytest
import torch

from multimodal.errors import UsageError
from multimodal.tokens.audio.log_mel import filterbank
from multimodal.train.objectives import augment_speech
from multimodal.train.objectives.augment_speech import SpeechAugmentation, augment, warped

NONE = SpeechAugmentation(speed=0.0, volume=0.0, noise=0.0, time_masks=0.0, freq_masks=0)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("settings", [SpeechAugmentation(), SpeechAugmentation(warp=0.15, channel=6.0)])
def test_augmented_frames_stay_finite_and_near_the_pace(settings):
    for seed in range(20):
        made = augment(torch.randn(200, 80), settings, seeded(seed))
        assert 180 <= len(made) <= 220
        assert made.isfinite().all()
    assert len(augment(torch.randn(1, 80), settings, seeded(0))) == 1


def test_augmentation_of_no_strength_changes_nothing():
    features = torch.randn(50, 80).clamp(min=-1)
    assert torch.allclose(augment(features, NONE, seeded(0)), features, atol=1e-6)


def test_time_masks_have_up_to_12_frames_in_longer_utterances(monkeypatch):
    longest = []
    kept = lambda x, _, masks, ratio, *__: longest.append(len(x) * ratio) or x
    monkeypatch.setattr(augment_speech, "spec_augment", kept)
    for frames in range(240, 1000):
        augment(torch.zeros(frames, 1), NONE, seeded(0))
    assert set(map(int, longest)) == {12}


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_a_warped_tone_is_one_of_another_frequency(factor):
    times = torch.arange(16000) / 16000
    tones = {hz: filterbank(torch.sin(2 * torch.pi * hz * times)) for hz in (2000.0, 2000.0 * factor)}
    heard = warped(tones[2000.0 * factor], factor).mean(0).argmax().item()
    assert abs(heard - tones[2000.0].mean(0).argmax().item()) <= 1


def test_a_channel_changes_all_frames_alike_and_no_more_than_asked():
    features = torch.randn(50, 80) + 3
    change = augment(features, replace(NONE, channel=6.0), seeded(1)) - features
    assert torch.allclose(change, change[:1].expand(50, 80), atol=1e-5)
    decibels = change[0] * 4.75 * 10 / torch.tensor(10.0).log()
    assert 1 < decibels.abs().max() <= 6.001
    assert decibels.diff().abs().max() < 1


@pytest.mark.parametrize("wrong", [{"warp": 1.0}, {"warp": -0.1}, {"channel": -1.0}, {"channel": float("inf")}])
def test_strengths_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SpeechAugmentation(**wrong)
