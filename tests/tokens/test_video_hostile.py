"""Videos that are damaged, cut, empty, or no videos: one clear line each, and the good frames go on."""

import io
import struct

import av
import numpy as np
import pytest

from multimodal.errors import VideoError
from multimodal.tokens.video.reading import DamagedVideo, VideoOptions, frames, read_info
from tests.helpers.data.audio_files import wav
from tests.helpers.data.video_files import noise, ramp, video

ALL = VideoOptions(every_s=0.1)


def without_frames(form: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream("mpeg4", rate=10, width=64, height=64)
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    return file.getvalue()


def bomb(size: int) -> bytes:
    """PNG images whose headers promise `size` x `size` pixels."""
    data = bytearray(video(ramp(2), form="mov", codec="png"))
    for place in [place for place in range(len(data)) if data[place : place + 4] == b"IHDR"]:
        data[place + 4 : place + 12] = struct.pack(">2I", size, size)
    return bytes(data)


def false_size(width: int, height: int) -> bytes:
    """An MP4 whose track and codec headers promise this size."""
    data = bytearray(video(ramp(2), form="mov", codec="rawvideo"))
    place = data.index(b"stsd")
    data[place + 44 : place + 48] = struct.pack(">2H", width, height)
    return bytes(data)


CASES = {
    "text": (b"hello " * 100, "not a readable video"),
    "a image": (b"\xff\xd8\xff\xe0" + bytes(999), "not a readable video"),
    "nothing": (b"", "empty"),
    "a recording": (wav(np.zeros(800, np.float32)), r"no video stream \(wav: audio\)"),
    "a cover image": (
        video(ramp(1), codec="mjpeg", sound=1.0, cover=True),
        "no video stream .*an attached cover image is not a video",
    ),
    "no index": (video(ramp(20))[:900], r"the video ends early \(an MP4 without its index, moov\)"),
    "no frames": (without_frames("avi"), "no frames"),
    "no streams": (without_frames("mp4"), "no video stream"),
    "a bomb": (bomb(30000), "no frames .*2 failed"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line(case):
    data, words = CASES[case]
    for read in (lambda: list(frames(data)), lambda: read_info(data)):
        with pytest.raises(VideoError, match=words) as error:
            read()
        assert str(error.value).startswith("<bytes>: ")
        assert "\n" not in str(error.value)


def test_damage_in_the_middle_costs_only_its_frames():
    data = bytearray(video(noise(20), form="mov", codec="mjpeg"))
    place = len(data) // 2
    data[place : place + 3000] = bytes(3000)
    spans = []
    found = [frame.time for frame in frames(bytes(data), ALL, spans)]
    assert 15 <= len(found) < 20
    assert found[0] == 0.0
    assert found[-1] == 1.9
    assert spans
    assert all("undecodable" in span.what and 0.4 < span.start <= span.end < 1.4 for span in spans)
    scenes = []
    assert [*frames(bytes(data), VideoOptions(scenes=0.9), scenes)]
    assert scenes == spans
    with pytest.warns(DamagedVideo, match=r"^<bytes>: damaged: undecodable frames \(\d"):
        assert [frame.time for frame in frames(bytes(data), ALL)] == found


def test_a_cut_video_is_read_up_to_the_cut(tmp_path):
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=10, width=64, height=64)
        for image in noise(40):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    whole = path.read_bytes()
    for options in (ALL, VideoOptions(max_frames=8)):
        spans = []
        times = [frame.time for frame in frames(whole[: len(whole) // 2], options, spans)]
        expected = [frame.time for frame in frames(whole, options)]
        assert 1 < len(times) < len(expected)
        assert set(times) <= set(expected) | {times[-1]}
        assert "missing: the video ends early" in [span.what for span in spans]


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(VideoError, match="no such file"):
        next(frames(tmp_path / "none.mp4"))
    with pytest.raises(VideoError, match="a folder"):
        next(frames(tmp_path))
