"""Damaged recordings: losses become silence with reported times; later audio keeps its time."""

import io
import warnings

import av
import numpy as np
import pytest
import torch

from multimodal.errors import AudioError
from multimodal.tokens.audio.damage import LOST, DamagedSpan, DecoderClock
from multimodal.tokens.audio.reading import TruncatedAudio, read_audio, stream_audio
from tests.helpers.data.audio_files import LOSSY, chirp, encode, refused, wav
from tests.helpers.spread import spread, thin


def sweep(rate: int, seconds: float) -> np.ndarray:
    """200 Hz to 3 kHz over the whole length, so that every second of it sounds unlike every other."""
    at = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * (200 * at + 1400 / seconds * at**2))).astype(np.float32)


def late(sound: torch.Tensor, true: np.ndarray, at: float) -> float:
    """Seconds by which the second at `at` comes late in `sound`, looked for 0.4 s around."""
    part, start = true[int(at * 16000) :][:16000], int((at - 0.4) * 16000)
    matches = np.correlate(sound[start : start + 28800].numpy(), part, "valid")
    return float(matches.argmax()) / 16000 - 0.4


def overwritten(file: bytes, share: float, size: int, by: str) -> bytes:
    place = int(share * len(file))
    junk = bytes(size) if by == "zeros" else np.random.default_rng(1).bytes(size)
    return file[:place] + junk + file[place + size :]


BROKEN = [("flac", "flac", 44100, "noise"), ("mpegts", "aac", 48000, "noise"), ("mp3", "libmp3lame", 44100, "zeros"),
          ("ogg", "libopus", 48000, "zeros"), *[(*kind, "noise") for kind in LOSSY]]  # fmt: skip


@pytest.mark.parametrize(("form", "codec", "rate", "by"), spread(BROKEN, 2, pytest.mark.slow, pytest.mark.ci))
def test_sound_after_damage_keeps_its_time(form, codec, rate, by):
    """Overwritten in two places, of which webm loses whole clusters of up to 5 s."""
    file = encode(sweep(rate, 24), rate, form, codec)
    file = overwritten(overwritten(file, 0.3, 4000, by), 0.7, 1500, by)
    spans: list[DamagedSpan] = []
    with pytest.warns(TruncatedAudio, match="damaged, .* s replaced by silence, first at") as caught:
        sound = torch.cat(list(stream_audio(file, on_truncated="warn", damage=spans)))
    assert len(caught) == 1
    assert abs(len(sound) / 16000 - 24) < 0.06
    assert {span.what for span in spans} == {LOST}
    for share in (0.3, 0.7):
        assert [s for s in spans if s.start - 1 < 24 * share < s.end + 1] != [], spans
    for start, end, _ in spans:
        assert 0 < end - start < 6
    true = sweep(16000, 24)
    for at in [2, *(end + 0.2 for _, end, _ in spans), 22.5]:
        if at < 22.6 and not any(start < at + 1 and at < end for start, end, _ in spans):
            assert abs(late(sound, true, at)) < 0.05, at


@pytest.mark.ci
def test_losses_in_mp3_and_adts_are_counted_by_their_bytes():
    """Neither stream carries times; in mp3 of varying bit rate the header's count decides."""
    rng, form = np.random.default_rng(0), {"vbr": "mp3", "plain": "mp3", "adts": "adts"}
    sound = sweep(44100, 24) * np.repeat(rng.uniform(0.05, 1, 24), 44100).astype(np.float32)
    for kind, options in (("vbr", {"flags": "+qscale", "global_quality": "472"}), ("plain", {}), ("adts", {})):
        whole = encode(sound, 44100, form[kind], "aac" if kind == "adts" else "libmp3lame", options=options)
        if kind == "plain":  # without the first frame, which holds the count
            whole = whole[whole.index(b"\xff\xfb", whole.index(b"Info")) :]
        spans: list[DamagedSpan] = []
        got = torch.cat(list(stream_audio(overwritten(whole, 0.4, 5000, "noise"), on_truncated="ignore", damage=spans)))
        assert abs(len(got) - len(read_audio(whole))) < 0.06 * 16000, kind
        assert abs(late(got, read_audio(whole).numpy(), 16)) < 0.06, kind
        assert len(spans) == 1


def test_joined_mp3_files_have_no_holes():
    """A tag between the two is no lost sound."""
    one = encode(chirp(44100), 44100, "mp3", "libmp3lame")
    tag = b"ID3\x04\0\0\0\0\x40\0" + bytes(8192)
    start = one.index(b"\xff\xfb", one.index(b"Info"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert abs(len(read_audio(one[start:] + tag + one[start:])) - 6 * 16000) < 4000


def test_a_clock_follows_the_container():
    clock = DecoderClock("a", length=100.0)
    assert [clock.frame(time, 1.0) for time in (5.0, 6.0, 7.02, 8.0)] == [0, 0, 0, 0]  # jitter
    assert clock.frame(9.2, 1.0) == pytest.approx(0.2)  # a pause of Opus: filled, no damage
    assert clock.frame(13.2, 1.0) == pytest.approx(3)
    assert clock.lost == [DamagedSpan(pytest.approx(5.2), pytest.approx(8.2), LOST)]
    assert clock.frame(0.0, 1.0) == 0  # another recording begins
    assert clock.frame(1.5, 1.0) == pytest.approx(0.5)
    assert clock.frame(90000.0, 1.0) == 0  # no day of silence
    assert clock.frame(90001.0, 1.0) == 0
    assert clock.lost[-1].what.startswith("damaged: a gap of")
    assert clock.seconds == pytest.approx(5.2 + 4 + 1 + 1.5 + 2)


def test_a_disk_that_fails_is_an_early_end(tmp_path, monkeypatch):
    class Failing(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > 200000:
                raise OSError(5, "Input/output error")
            return super().read(size)

    file = Failing(wav(sweep(16000, 24)))
    monkeypatch.setattr("multimodal.tokens.demux.open_media", lambda *_: file)
    refused("a.wav", "ends early")


@thin(4, pytest.mark.ci)
@pytest.mark.parametrize(("form", "codec"), [("asf", "wmav2"), ("avi", "libmp3lame"), ("w64", "pcm_s16le"),
                                             ("caf", "pcm_s16le"), ("au", "pcm_s16be"), ("wv", "wavpack"),
                                             ("wav", "adpcm_ima_wav"), ("wav", "adpcm_ms")])  # fmt: skip
def test_rarer_containers_that_end_early(form, codec):
    file = encode(sweep(44100, 12), 44100, form, codec, options={"b": "96k"} if codec == "wmav2" else None)
    assert abs(len(read_audio(file)) - 12 * 16000) < 0.1 * 16000
    refused(file[: len(file) // 2], "ends early")


@pytest.mark.parametrize(("form", "codec"), [("mp3", "libmp3lame"), ("adts", "aac"), ("mpegts", "aac")])
def test_streams_that_state_no_length_and_end_inside_a_frame(form, codec):
    file = encode(sweep(44100, 6), 44100, form, codec)
    if form == "mp3":  # without the first frame, which holds the count, and with a tag
        file = file[file.index(b"\xff\xfb", file.index(b"Info")) :] + b"TAG".ljust(128)
    assert abs(len(read_audio(file)) - 6 * 16000) < 0.1 * 16000
    refused(file[: len(file) // 2 + 7], "ends early")


def fragmented(file: bytes) -> bytes:
    """An MP4 in fragments of a second, as browsers and streaming servers write them."""
    made, options = io.BytesIO(), {"movflags": "empty_moov", "frag_duration": "1000000"}
    with av.open(io.BytesIO(file)) as source, av.open(made, "w", "mp4", container_options=options) as container:
        stream = container.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    return made.getvalue()


def test_a_fragmented_mp4_that_is_cut_or_broken_ends_early():
    file = fragmented(encode(sweep(48000, 12), 48000, "mp4", "aac"))
    size = file.rindex(b"mdat") - 4
    to_the_end = file[: file.rindex(b"mfra") - 4]  # without the index behind the last fragment
    to_the_end = to_the_end[:size] + bytes(4) + to_the_end[size + 4 :]
    for whole in (file, file + b"\xff" * 99, to_the_end):
        assert abs(len(read_audio(whole)) - 12 * 16000) < 0.1 * 16000
    cut = int(0.56 * len(file))  # near a fragment's end: FFmpeg misses none of it
    refused(file[:cut], "ends early")
    refused(file[:cut] + file[cut - 1500 :], "ends early")


@pytest.mark.parametrize("order", ["<", ">"])
def test_sphere_files_of_speech_corpora_are_read_and_say_what_is_missing(order):
    samples = (sweep(16000, 1) * 32768).astype(np.int16)[:, None] // [1, 3]
    fields = ["channel_count -i 2", "sample_count -i 16000", "sample_rate -i 16000", "sample_n_bytes -i 2",
              f"sample_byte_format -s2 {'01' if order == '<' else '10'}", "end_head"]  # fmt: skip
    header = "\n".join(["NIST_1A", "   1024", *fields, ""]).encode().ljust(1024)
    file = header + samples.astype(f"{order}i2").tobytes()
    assert torch.equal(read_audio(file), torch.from_numpy((samples / 32768).mean(1).astype(np.float32)))
    with pytest.raises(AudioError, match=r"ends early \(got 0\.25 s of 1\.00 s\)"):
        read_audio(file[: 1024 + 4 * 4000])
