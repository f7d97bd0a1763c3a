"""Recordings read in a stream: the survey, mel windows equal to those of the whole, clips, warnings once."""

import itertools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

from multimodal.errors import AudioError, UsageError
from multimodal.tasks.transcribe import audio_source
from multimodal.tasks.transcribe.audio_source import AudioSource, MelReader, clip_waves, survey
from multimodal.tokens.audio.log_mel import HOP, RATE, log_mel
from multimodal.tokens.audio.reading import TruncatedAudio, read_audio
from tests.helpers.data.audio_files import chirp, wav
from tests.helpers.spread import thin


def sound(samples: int) -> torch.Tensor:
    """Noise that swells, so that the loudest frame is near the end."""
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(samples))
    return 0.1 * noise * torch.linspace(0.001, 1, samples) ** 3


def reader(recording: AudioSource, bands: int = 80, kept: bool = False) -> MelReader:
    found = survey(recording, bands=bands)
    return MelReader(recording, bands, found.mel_peak, found.samples, mel=found.mel if kept else None)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("kept", [False, True])
@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("samples", [1, 150, 200, 201, 399, 1600, 96000, 480000, 480001, 33 * RATE + 77])
def test_windows_equal_the_mel_of_the_whole(samples, bands, kept):
    size = 600 if samples < 200000 else 3000  # 6 s and 30 s of context
    wave = sound(samples)
    whole = log_mel(F.pad(wave, (0, size * HOP)), bands)
    mel = reader(AudioSource(wave, quiet=True), bands, kept)
    assert (mel.mel is not None) == kept
    assert mel.frames == samples // HOP
    for seek in (0, 1, 2, 5, max(6, mel.frames // 2), max(7, mel.frames - 3), mel.frames + 8):
        count = min(size, whole.shape[-1] - seek)
        for frames in {1, count}:
            expected = whole[:, seek : seek + frames]
            torch.testing.assert_close(mel.window(seek, frames), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kept", [False, True])
def test_windows_of_a_file_equal_those_of_its_samples(kept):
    file = wav(sound(65 * RATE).numpy())
    whole = log_mel(F.pad(read_audio(file), (0, 30 * RATE)))
    mel = reader(AudioSource(file), kept=kept)
    for seek in (0, 2950, 2951, 5900, 6400):
        torch.testing.assert_close(mel.window(seek, 3000), whole[:, seek : seek + 3000], atol=1e-6, rtol=0)


def test_a_window_further_back_is_read_again():
    mel = reader(AudioSource(sound(95 * RATE)))
    first = mel.window(10, 500)
    mel.window(8000, 500)
    assert torch.equal(mel.window(10, 500), first)


@pytest.mark.ci
def test_the_windows_hold_little(monkeypatch):
    held = []
    mel = reader(AudioSource(sound(600 * RATE)))
    for seek in range(0, mel.frames, 2900):
        mel.window(seek, 3000)
        held.append(sum(len(chunk) for chunk in mel.spans.buffer))
    assert max(held) <= 91 * RATE


@pytest.fixture
def nothing_kept(monkeypatch):
    monkeypatch.setattr(audio_source._room, "left", 0)


def test_a_recording_that_shrinks_between_the_passes_is_refused(tmp_path, nothing_kept):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(sound(50 * RATE).numpy()))
    mel = reader(AudioSource(path))
    path.write_bytes(wav(sound(20 * RATE).numpy()))
    with pytest.raises(AudioError, match=r"a\.wav: changed while it was read"):
        mel.window(0, 3000)


@pytest.mark.parametrize("samples", [1000, 16000, 16000 * 7 + 3, 16000 * 100])
def test_spread_windows(samples):
    wave = sound(samples)
    found = survey(AudioSource(wave), windows=8, size=16000)
    assert found.samples == samples
    assert found.mel_peak is None
    assert min(4, samples // 16000) <= len(found.windows) <= 8
    for first, part in found.windows:
        assert torch.equal(part, wave[first : first + 16000])
    starts = [first for first, _ in found.windows]
    steps = {b - a for a, b in itertools.pairwise(starts)}
    assert len(steps) <= 1
    assert starts[-1] + 2 * (steps or {16000}).pop() > samples - 16000  # the last one is near the end
    assert survey(AudioSource(wave)).windows == []


def test_a_survey_passes_every_sample_on():
    wave, chunks = sound(70 * RATE), []
    survey(AudioSource(wave), push=chunks.append)
    assert torch.equal(torch.cat(chunks), wave)


def test_clips_in_one_pass():
    wave, passes = sound(100 * RATE), []
    recording = AudioSource(wave)
    read = recording.chunks
    recording.chunks = lambda: passes.append(1) or read()
    clips = [(0, 100), (50, 40 * RATE), (40 * RATE, 40 * RATE + 5), (95 * RATE, 105 * RATE), (101 * RATE, 102 * RATE)]
    found = list(clip_waves(recording, clips))
    assert [first for first, _ in found] == [0, 50, 40 * RATE, 95 * RATE]
    for (start, stop), (_, part) in zip(clips, found, strict=False):
        assert torch.equal(part, wave[start:stop])
    assert len(passes) == 1


def test_a_file_is_decoded_once_if_its_samples_can_be_kept(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(sound(70 * RATE).numpy()))
    reads = []
    real = audio_source.stream_audio
    monkeypatch.setattr(audio_source, "stream_audio", lambda *args, **named: reads.append(args) or real(*args, **named))
    before, recording = audio_source._room.left, AudioSource(path)
    whole = [torch.cat(list(recording.chunks())) for _ in range(3)]
    assert torch.equal(whole[0], whole[2])
    assert (len(reads), audio_source._room.left) == (1, before - 70 * RATE)
    recording.close()
    assert audio_source._room.left == before
    monkeypatch.setattr(audio_source._room, "left", 40 * RATE)  # less than the recording
    other = AudioSource(path)
    assert all(torch.equal(torch.cat(list(other.chunks())), whole[0]) for _ in range(2))
    assert (len(reads), audio_source._room.left) == (3, 40 * RATE)


def test_a_file_read_ahead_is_what_it_is_else(tmp_path):
    path = tmp_path / "half.wav"
    file = wav(sound(80 * RATE).numpy())
    path.write_bytes(file[: len(file) // 2])
    recordings = [AudioSource(path), AudioSource(path)]
    recordings[1].read_ahead()
    with pytest.warns(TruncatedAudio, match="ends early") as caught:
        first, second = (torch.cat(list(recording.chunks())) for recording in recordings)
    assert len(caught) == 2
    assert torch.equal(first, second)
    assert recordings[0].damage == recordings[1].damage
    missing = AudioSource(tmp_path / "none.wav")
    missing.read_ahead()
    with pytest.raises(AudioError, match=r"none\.wav"):
        list(missing.chunks())
    unread = AudioSource(path)
    unread.read_ahead()
    unread.close()
    for thread in [one for one in threading.enumerate() if one.name == "ahead"]:
        thread.join(5)
    assert not any(one.name == "ahead" for one in threading.enumerate())


def test_every_pass_reads_anew_but_warns_once(tmp_path, nothing_kept):
    path = tmp_path / "half.wav"
    file = wav(sound(4 * RATE).numpy())
    path.write_bytes(file[: len(file) // 2])
    recording = AudioSource(path)
    with pytest.warns(TruncatedAudio, match=r"half\.wav: the recording ends early") as caught:
        passes = [torch.cat(list(recording.chunks())) for _ in range(2)]
    assert torch.equal(*passes)
    assert len(caught) == 1
    assert [span.what for span in recording.damage] == ["missing: the recording ends early"]
    start, end, _ = recording.damage[0]
    assert (round(start, 2), round(end, 2)) == (2.0, 4.0)
    with pytest.raises(AudioError, match="ends early"):
        list(AudioSource(path, on_truncated="error").chunks())


def test_a_channel_alone():
    left = chirp(16000)
    stereo = wav(torch.stack([torch.from_numpy(left), -0.5 * torch.from_numpy(left)]).numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = torch.cat(list(AudioSource(stereo, channel=1).chunks()))
    assert (right + 0.5 * torch.from_numpy(left)).abs().max() < 1e-4


def test_samples_have_one_track_and_known_channels():
    with pytest.raises(UsageError, match="channel 1: <samples> has 1 channels"):
        list(AudioSource(torch.ones(5), channel=1).chunks())
    with pytest.raises(UsageError, match="audio_track 2: samples have one track"):
        AudioSource(torch.ones(5), audio_track=2)
