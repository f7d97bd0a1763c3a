"""Hostile and odd audio files: implausible headers, disguised playlists, several tracks, odd levels."""

import io
import re
import socket
import struct
import warnings
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from multimodal.errors import AudioError, UsageError
from multimodal.tasks.transcribe.audio_source import AudioSource
from multimodal.tokens.audio.damage import MOST_SILENCE, DecoderClock
from multimodal.tokens.audio.levels import Levels
from multimodal.tokens.audio.offset import LiveOffset, without_offset
from multimodal.tokens.audio.pcm import PcmReader
from multimodal.tokens.audio.reading import OddAudio, count_channels, read_audio, stream_audio
from tests.helpers.data.audio_files import chirp, encode, float_wav, wav
from tests.helpers.spread import thin


def header(rate: int = 16000, channels: int = 1, bits: int = 16, kind: int = 1) -> bytes:
    """A WAV whose header claims these; 4,000 bytes of samples."""
    block, data = channels * bits // 8, b"\1\0\xff\xff" * 1000
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, kind, channels, rate, rate * block & 0xFFFFFFFF, block & 0xFFFF, bits)
    chunks = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def remarks(source: bytes | Path, **options) -> list[str]:
    actual: list[str] = []
    for _ in stream_audio(source, remarks=actual, **options):
        pass
    return actual


@pytest.mark.parametrize("rate", [1, 999, 3072001, 2147483647])
def test_an_implausible_rate_is_refused_before_memory_is_asked_for(rate, tmp_path, monkeypatch):
    (tmp_path / "srmax.wav").write_bytes(header(rate))
    monkeypatch.setattr("multimodal.tokens.audio.reading.Resampler", None)
    monkeypatch.setattr("multimodal.tokens.audio.reading.MonoMixer", None)
    with pytest.raises(AudioError, match=rf"srmax.wav: sample rate {rate} Hz, expected 1,000 to 3,072,000$"):
        read_audio(tmp_path / "srmax.wav")
    with pytest.raises(AudioError, match=f"sample rate {rate} Hz"):
        count_channels(header(rate))


@pytest.mark.parametrize("lie", [{"channels": 0}, {"channels": 65535}, {"bits": 64}, {"bits": 0}, {"bits": 65528}])
def test_other_lies_of_a_header_are_one_line(lie):
    with pytest.raises(AudioError) as caught:
        read_audio(header(**lie))
    assert str(caught.value).startswith("<bytes>: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rate", [44101, 383999, 3071999])
def test_rates_without_a_common_divisor_need_no_large_kernel(rate):
    assert len(read_audio(wav(chirp(rate, 0.2), rate))) == pytest.approx(3200, abs=40)


@pytest.mark.parametrize("rate", [0, 999, 3072001, 2**31])
def test_rates_that_a_caller_names_are_held_to_the_same_limits(rate):
    for call in (lambda: stream_audio(b"x", rate), lambda: PcmReader(lambda n: b"", rate)):
        with pytest.raises(UsageError, match=r"rate: must be a whole number from 1,000 to 3,072,000 Hz"):
            call()
    with pytest.raises(UsageError, match="max_seconds"):
        read_audio(b"x", max_seconds=float("inf"))


def test_a_clock_that_lies_does_not_ask_for_years_of_silence():
    clock = DecoderClock("x", 0.0, length=1e9)
    assert clock.frame(0.0, 1.0) == 0.0
    assert clock.frame(3601.0, 1.0) == 3600.0
    assert clock.frame(9e8, 1.0) == 0.0
    assert sum(clock.frame(3600.0 * n, 1.0) for n in range(2, 999)) <= MOST_SILENCE


def test_a_header_cannot_make_ffmpeg_ask_for_gigabytes():
    """A LIST chunk of 58 bytes whose first part claims 2 GB: FFmpeg would make room for it all and touch it."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16)
    info = b"INFO" + struct.pack("<4sI", b"ISFT", 0x7FFFFF00) + b"x" * 50
    file = b"RIFF" + struct.pack("<I", 200) + b"WAVE" + form + struct.pack("<4sI", b"LIST", len(info)) + info
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = peak()
    with pytest.raises(AudioError):
        read_audio(file)
    assert peak() - before < 200 << 10  # 2 GB without a limit


def peak() -> int:
    """The process's largest memory in KiB."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def playlists(target: Path, port: int) -> dict[str, bytes]:
    media = [str(target), f"file:{target}", f"http://127.0.0.1:{port}/a.ts", f"subfile,,start,0,end,0,,:{target}",
             f"concat:{target}|{target}", f"tcp://127.0.0.1:{port}", f"crypto:{target}"]  # fmt: skip
    hls = "".join(f"#EXTINF:1,\n{one}\n" for one in media)
    return {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n{hls}#EXT-X-ENDLIST\n".encode(),
        "concat": ("ffconcat version 1.0\n" + "".join(f"file '{one}'\n" for one in media)).encode(),
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 40004 RTP/AVP 0\n",
        "dash": f'<MPD><Period><AdaptationSet mimeType="audio/mp4"><Representation><BaseURL>http://127.0.0.1:{port}/'
        "</BaseURL></Representation></AdaptationSet></Period></MPD>".encode(),
        "lavfi": b"sine=frequency=440",
        "rtsp": f"RTSPtext\nrtsp://127.0.0.1:{port}/".encode(),
        "asx": f'<asx><entry><ref href="http://127.0.0.1:{port}/"/></entry></asx>'.encode(),
    }


@pytest.mark.parametrize("suffix", ["m3u8", "mp3", "wav", "sdp", "ffconcat"])
@pytest.mark.parametrize("kind", ["hls", "concat", "sdp", "dash", "lavfi", "rtsp", "asx"])
def test_no_file_makes_ffmpeg_open_another_file_or_address(kind, suffix, tmp_path):
    (tmp_path / "secret.wav").write_bytes(wav(chirp(16000)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.02)
        bait = tmp_path / f"bait.{suffix}"
        bait.write_bytes(playlists(tmp_path / "secret.wav", server.getsockname()[1])[kind])
        for source in (bait, bait.read_bytes()):
            with pytest.raises(AudioError, match=r"not a readable recording|no audio"):
                read_audio(source)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_quicktime_reference_is_not_followed(tmp_path):
    """`dref` may name the file that holds the samples: without its own samples nothing is read."""
    (tmp_path / "secret.wav").write_bytes(wav(chirp(16000)))
    file = encode(chirp(16000), 16000, "mov", "pcm_s16le")
    at = file.index(b"url \0\0\0\1")  # flag 1: in this file
    lie = file[:at] + b"url \0\0\0\0" + file[at + 8 :]
    (tmp_path / "bait.mov").write_bytes(lie)
    actual = read_audio(tmp_path / "bait.mov", on_truncated="warn")
    assert len(actual) == pytest.approx(48000, abs=10)  # its own samples, whatever the reference says


def film(*tracks: np.ndarray, form: str = "matroska", default: int = 0) -> bytes:
    """A file with these audio tracks at 16 kHz; `default` is marked so."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        streams = [
            container.add_stream("aac" if form == "mp4" else "pcm_s16le", rate=16000, layout="mono") for _ in tracks
        ]
        for number, stream in enumerate(streams):
            stream.disposition = av.stream.Disposition.default if number == default else av.stream.Disposition(0)
        for start in range(0, len(tracks[0]), 1024):
            for sound, stream in zip(tracks, streams, strict=True):
                part = np.ascontiguousarray(sound[None, start : start + 1024])
                frame = av.AudioFrame.from_ndarray((part * 32767).astype(np.int16), format="s16", layout="mono")
                frame.sample_rate, frame.pts = 16000, start
                container.mux(stream.encode(frame))
        for stream in streams:
            container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(("form", "default"), [("matroska", 0), ("matroska", 1), ("mp4", 0), ("mov", 1)])
def test_the_default_track_is_taken_and_the_others_are_named(form, default):
    sound = chirp(16000)
    file = film(0.25 * sound, 0.5 * sound, form=form, default=default)
    assert read_audio(file).abs().max() == pytest.approx((0.25, 0.5)[default] / 2, rel=0.1)
    (text,) = remarks(file)
    assert f"audio track {default + 1} of 2 is used; audio_track selects (1 " in text
    for number, gain in ((1, 0.25), (2, 0.5)):
        assert read_audio(file, audio_track=number).abs().max() == pytest.approx(gain / 2, rel=0.1)
        assert remarks(file, audio_track=number) == []
        assert count_channels(file, number) == 1


def test_a_silent_track_beside_one_that_speaks_is_said(tmp_path):
    (tmp_path / "film.mkv").write_bytes(film(0 * chirp(16000), 0 * chirp(16000), chirp(16000)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recording = AudioSource(tmp_path / "film.mkv")
        assert [float(torch.cat(list(recording.chunks())).abs().max()) for _ in range(2)] == [0, 0]
    texts = [str(one.message) for one in caught if one.category is OddAudio]
    (text,) = texts  # of the first pass only
    assert "film.mkv: audio track 1 of 3 is silent, track 3 is not; audio_track selects (1 pcm" in text
    assert AudioSource(tmp_path / "film.mkv", audio_track=3).chunks().__next__().abs().max() > 0.4


@pytest.mark.parametrize("track", [3, 0, -1])
def test_a_track_that_does_not_exist_is_one_line(track):
    file = film(chirp(16000), chirp(16000))
    message = "<bytes>: no audio track 3, only 2 (1 pcm_s16le 1 ch, 2 pcm_s16le 1 ch)"
    with pytest.raises(UsageError) as caught:
        read_audio(file, audio_track=track)
    assert str(caught.value) == message if track == 3 else "audio_track: must be a whole number" in str(caught.value)


@thin(2, pytest.mark.ci)
@pytest.mark.parametrize("rate", [16000, 44100])
@pytest.mark.parametrize("offset", [0.6, 0.1, -0.3, 0.02])
@pytest.mark.parametrize("seconds", [0.4, 1.05, 12.3])
def test_an_offset_is_subtracted(offset, seconds, rate):
    sound = 0.3 * chirp(rate, seconds)
    clean, shifted = read_audio(float_wav(sound, rate)), read_audio(float_wav(sound + np.float32(offset), rate))
    inside = slice(100, -100)  # the resampler's ends hear the step from nothing to the offset's residue
    assert (shifted - clean)[inside].abs().max() < max(2e-3 / seconds, 1e-4)
    (text,) = remarks(float_wav(sound + np.float32(offset), rate))
    told = re.search(r"a DC offset of (\S+) of full scale is subtracted$", text)
    assert float(told[1]) == pytest.approx(offset, abs=5e-3)


def test_the_offset_of_each_channel_is_its_own_and_clean_ones_stay():
    sound = np.stack([0.2 * chirp(16000, 4.0)] * 2)
    file = wav(sound + np.array([[0.5], [0.0]], np.float32))
    assert torch.equal(*(torch.cat(list(stream_audio(one, channel=1))) for one in (file, wav(sound))))
    left = torch.cat(list(stream_audio(file, channel=0)))
    assert (left - torch.from_numpy(sound[0])).abs().max() < 1e-3


def test_the_offset_of_joined_recordings_is_found_for_each_part():
    sound = 0.3 * chirp(16000, 20.0)
    level = np.repeat(np.array([0.0, 0.4, -0.2, 0.0], np.float32), 5 * 16000)
    actual = read_audio(float_wav(sound + level))
    error = np.abs(actual.numpy() - sound).reshape(20, 16000).max(axis=1)
    assert (error < 2e-3).sum() >= 14  # but for the pieces of 1.024 s in which the level changes


def test_what_does_not_last_is_no_offset():
    """Wind and rumble, a step of less than 3 s, and a start that settles stay as they are, bit for bit."""
    at = np.arange(12 * 16000) / 16000
    wind = (0.3 * np.sin(2 * np.pi * 0.23 * at)).astype(np.float32)
    bump = 0.1 * chirp(16000, 12.0)
    bump[40000:70000] += 0.3
    for sound in (wind, bump):
        assert torch.equal(read_audio(float_wav(sound)), torch.from_numpy(sound))


def test_sound_without_an_offset_is_measured_in_one_pass():
    piece = np.stack([chirp(16000, 1.0), 0.3 * chirp(16000, 1.0)])
    levels = Levels()
    actual = list(without_offset([(16000, piece)] * 3, lambda: pytest.fail("read again"), levels))
    assert all(sound is piece for _, sound in actual)
    assert levels.remarks() == []


def test_samples_and_live_streams_lose_their_offset_too():
    sound = torch.from_numpy(0.3 * chirp(16000, 6.0))
    with pytest.warns(OddAudio, match="a DC offset of 0.6"):
        clean = torch.cat(list(AudioSource(sound + 0.6).chunks()))
    assert (clean - sound).abs().max() < 1e-4
    assert torch.equal(torch.cat(list(AudioSource(sound).chunks())), sound)
    live, whole = LiveOffset(16000), sound.numpy()
    actual = np.concatenate([live.push(part + np.float32(0.6)) for part in whole.reshape(-1, 1600)])
    assert np.abs(actual - whole).max() < 0.02
    live = LiveOffset(16000)
    assert all(live.push(part) is part for part in whole.reshape(-1, 1600))


def test_odd_levels_are_remarked():
    sound = chirp(16000)
    assert remarks(wav(sound)) == []
    assert remarks(wav(0 * sound)) == ["<bytes>: silent, no sample above half a 16-bit step"]
    assert remarks(wav(0.01 * sound)) == ["<bytes>: very quiet, its peak is 0.005 of full scale"]
    (text,) = remarks(wav(np.clip(20 * sound, -1, 1)))
    assert text.startswith("<bytes>: clipped, 9")
    assert text.endswith("of the samples are at full scale")
    assert remarks(wav(np.stack([sound, 0 * sound])), channel=1)[0].startswith("<bytes>: channel 2: silent")
