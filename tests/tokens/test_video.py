"""Frames of videos: their times, by every way of sampling, as players show them."""

import io
import warnings
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from multimodal.errors import AudioError, UsageError
from multimodal.tokens.audio.reading import read_audio
from multimodal.tokens.video import decoding
from multimodal.tokens.video.reading import DamagedVideo, Frame, VideoOptions, frame_at, frames, read_info
from tests.helpers.data.video_files import grey, number_in, numbered, ramp, turned, video
from tests.helpers.spread import thin

CLIP = video(ramp(20))  # two seconds


def level(frame: Frame) -> int:
    """Number of a frame of `ramp`."""
    return round((np.asarray(frame.image).mean() - 10) / 10)


def places(source: bytes, **options: float) -> list[int]:
    return [level(frame) for frame in frames(source, VideoOptions(**options))]


def test_every_seconds_or_evenly_spread_or_both():
    assert [(f.time, level(f)) for f in frames(CLIP, VideoOptions(every_s=0.5))] == [
        (0.0, 0), (0.5, 5), (1.0, 10), (1.5, 15)
    ]  # fmt: skip
    assert places(CLIP, max_frames=4) == [2, 7, 12, 16]  # the middles of quarters of 1.94 s
    assert places(CLIP, max_frames=1) == [9]
    assert places(CLIP, every_s=0.1, max_frames=4) == places(CLIP, max_frames=4)
    assert places(CLIP, every_s=0.9, max_frames=4) == [0, 9, 18]
    assert len(places(CLIP)) == 16
    assert places(CLIP, max_frames=1000) == list(range(20))


def test_variable_rates_go_by_presentation_times():
    clip = video(ramp(6), [0, 0.1, 0.2, 3.0, 3.1, 9.0])
    assert [(f.time, level(f)) for f in frames(clip, VideoOptions(every_s=1.0))] == [
        (0.0, 0), (0.2, 2), (3.0, 3), (3.1, 4), (9.0, 5)
    ]  # fmt: skip
    assert level(frame_at(clip, 2.9)) == 2
    assert level(frame_at(clip, 100.0)) == 5


def test_ten_hours_of_few_frames():
    clip = video(ramp(20), [index * 1800.0 for index in range(20)])
    assert read_info(clip).duration > 9 * 3600
    assert places(clip, every_s=0.001) == list(range(20))
    assert [f.time for f in frames(clip, VideoOptions(max_frames=3))] == [5400.0, 16200.0, 27000.0]


@thin(5, pytest.mark.ci)
@pytest.mark.parametrize(
    ("form", "codec", "options"),
    [
        ("mp4", "libx264", {"g": "30", "bf": "3"}),
        ("mp4", "libx264", {"g": "30", "bf": "3", "x264-params": "open-gop=1"}),
        ("mp4", "libx264", {"g": "9999"}),  # one key image
        ("matroska", "libx264", {"g": "30", "bf": "3"}),
        ("webm", "libvpx", {"g": "30", "deadline": "realtime", "cpu-used": "8", "threads": "1"}),
        ("mpegts", "libx264", {"g": "30", "bf": "3"}),
        ("avi", "mpeg4", {"g": "12"}),
        ("avi", "mpeg4", {"g": "12", "bf": "2"}),
        ("avi", "libx264", {"g": "30", "bf": "3"}),
        ("asf", "libx264", {"g": "30", "bf": "3"}),
    ],
)
def test_seeks_change_no_frame(form, codec, options, monkeypatch):
    clip = video(list(numbered(300)), 25.0, form, codec, **options)
    every = [(frame.time, number_in(frame.image)) for frame in frames(clip, VideoOptions(every_s=0.02))]
    first = every[0][0]  # AVI and ASF, which have decoding times alone, begin with the delay of B-frames
    assert every == [(pytest.approx(first + number / 25, abs=2e-3), number) for number in range(300)]
    counted = []
    monkeypatch.setattr(decoding, "check_frame", lambda *_: counted.append(1))
    made = {}
    for jump in (1.0, 1e9):
        monkeypatch.setattr(decoding, "JUMP_SECONDS", jump)
        for chosen in (VideoOptions(max_frames=4), VideoOptions(every_s=2.5)):
            counted.clear()
            found = [(frame.time, number_in(frame.image)) for frame in frames(clip, chosen)]
            made.setdefault(str(chosen), []).append((found, len(counted)))
    for (sought, few), (read, many) in made.values():
        assert sought == read
        assert [number for _, number in read] == [round((time - first) * 25) for time, _ in read]
        assert few < 0.6 * many or options["g"] == "9999" or form == "asf"  # without an index


def test_no_video_begins_at_minus_zero():
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts") as made:  # starts a frame of 1/24 s late: at no whole microsecond
        stream = made.add_stream("mpeg2video", rate=24, width=64, height=64)
        stream.pix_fmt = "yuv420p"
        for image in (*(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8)) for _ in range(48)), None):
            made.mux(stream.encode(image))
    clip = file.getvalue()
    assert str(next(frames(clip, VideoOptions(every_s=0.01))).time) == "0.0"
    assert str(frame_at(clip, 0).time) == "0.0"


def test_scenes():
    clip = video([grey(level) for level in (10, 120, 240, 10) for _ in range(5)])
    assert [frame.time for frame in frames(clip, VideoOptions(scenes=0.3))] == [0.0, 0.5, 1.0, 1.5]
    assert len(list(frames(clip, VideoOptions(scenes=0.3, max_frames=2)))) == 2
    fade = video([grey(round(10 + 8 * index)) for index in range(20)])
    assert [frame.time for frame in frames(fade, VideoOptions(scenes=0.9))] == [0.0, 0.7, 1.5]


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((0, 1, -1, 0), Image.Transpose.ROTATE_270),
        ((-1, 0, 0, -1), Image.Transpose.ROTATE_180),
        ((0, -1, 1, 0), Image.Transpose.ROTATE_90),
        ((-1, 0, 0, 1), Image.Transpose.FLIP_LEFT_RIGHT),
        ((0, 1, 1, 0), Image.Transpose.TRANSPOSE),
    ],
)
def test_rotation_flags_are_applied(matrix, turn):
    image = grey(0, (64, 96))
    image[:, :48], image[:32, 48:] = (255, 0, 0), (0, 255, 0)
    clip = video([image] * 2)
    stored, shown = frame_at(clip, 0).image, frame_at(turned(clip, *matrix), 0).image
    assert np.array_equal(stored.transpose(turn), shown)
    assert read_info(turned(clip, *matrix))[1:3] == shown.size


def test_pixels_become_square():
    assert frame_at(video([grey(9)], shape=Fraction(4, 3)), 0).image.size == (85, 64)
    assert frame_at(video([grey(9)], shape=Fraction(3, 4)), 0).image.size == (64, 85)


@pytest.mark.parametrize(("colorspace", "name"), [(1, "ITU709"), (5, "ITU601"), (9, "BT2020")])
@pytest.mark.parametrize("value_range", [1, 2])  # limited, full
def test_colours_follow_their_matrix_and_range(colorspace, name, value_range):
    file, colour = io.BytesIO(), (200, 40, 90)
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10, width=64, height=64, options={"crf": "1"})
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = colorspace, value_range
        frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), colour, np.uint8), format="rgb24")
        coded = frame.reformat(format="yuv420p", dst_colorspace=name, dst_color_range=value_range)
        container.mux(stream.encode(coded))
        container.mux(stream.encode(None))
    shown = np.asarray(frame_at(file.getvalue(), 0).image).reshape(-1, 3)
    assert abs(shown - np.array(colour)).max() <= 4


def test_a_stream_that_states_no_length():
    class Pipe:
        def __init__(self):
            self.data = b""

        def write(self, data):
            self.data += data

    pipe = Pipe()
    with av.open(pipe, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=10, width=64, height=64)
        for image in ramp(20):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    assert read_info(pipe.data).duration == pytest.approx(2.0)
    assert places(pipe.data, max_frames=4) == [2, 7, 12, 17]


@pytest.mark.parametrize("form", ["mp4", "matroska"])
@pytest.mark.parametrize("start", [1.0, 100.0])
def test_timestamps_that_do_not_start_at_zero(form, start):
    clip = video(ramp(20), [start + index / 10 for index in range(20)], form, g="6")
    assert read_info(clip).duration == pytest.approx(1.94)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert places(clip, max_frames=4) == [2, 7, 12, 16]


def test_sound_beside_the_frames():
    clip = video(ramp(20), sound=2.0)
    info = read_info(clip)
    assert info.has_audio
    assert info.audio_start == 0.0
    assert abs(len(read_audio(clip)) / 16000 - 2) < 0.1
    assert not read_info(CLIP).has_audio
    assert read_info(CLIP)[:3] == (1.94, 64, 64)
    with pytest.raises(AudioError, match="no audio stream"):
        read_audio(CLIP)
    late = video(ramp(5), [1.0, 1.1, 1.2, 1.3, 1.4], sound=2.0)  # the sound starts at 0
    assert [frame.time for frame in frames(late, VideoOptions(every_s=0.25))] == [1.0, 1.2]


def test_sources(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(CLIP)
    with path.open("rb") as file:
        for source in (path, str(path), io.BytesIO(CLIP), file, file):
            assert [level(frame) for frame in frames(source, VideoOptions(max_frames=2))] == [4, 14]
    for wrong in (3, None):
        with pytest.raises(Exception, match=r"expected a path|violates"):
            next(frames(wrong))
    with pytest.raises(UsageError, match=r"scenes 0\.3: cannot be combined with every_s"):
        VideoOptions(every_s=1, scenes=0.3)


def test_a_frame_is_taken_while_the_next_ones_are_not_read():
    reader = frames(CLIP, VideoOptions(every_s=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", DamagedVideo)
        assert [level(next(reader)) for _ in range(3)] == [0, 1, 2]
        reader.close()
