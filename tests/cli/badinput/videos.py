"""Videos that are damaged, or none."""

import re
import struct
from pathlib import Path

from tests.helpers.data.video_files import noise, ramp, video

from .rows import Row, prints

CLASSIFY = "--labels a,b -m {clip} --format csv"


def sound_alone() -> None:
    """An MP4 whose only video stream is a cover image."""
    Path("bad.mp4").write_bytes(video(ramp(1), codec="mjpeg", sound=0.5, cover=True))


def bomb() -> None:
    """PNG frames whose headers promise 30,000 pixels each way."""
    data = bytearray(video(ramp(2), form="mov", codec="png"))
    for place in [place for place in range(len(data)) if data[place : place + 4] == b"IHDR"]:
        data[place + 4 : place + 12] = struct.pack(">2I", 30000, 30000)
    Path("bad.mov").write_bytes(data)


def holed() -> None:
    data = bytearray(video(noise(20), form="mov", codec="mjpeg"))
    place = len(data) // 2
    data[place : place + 3000] = bytes(3000)
    Path("bad.mov").write_bytes(data)


ROWS = [
    Row("a video that is text", f"classify bad.mp4 red.png {CLASSIFY}", lambda: Path("bad.mp4").write_text("no " * 99),
        [re.compile(r"error: bad\.mp4: not a readable video")], prints("red.png,")),
    Row("a song with a cover", f"classify bad.mp4 red.png {CLASSIFY}", sound_alone,
        [re.compile(r"error: bad\.mp4: no video stream .*an attached cover image is not a video")], prints("red.png,")),
    Row("a video without its index", f"classify bad.mp4 red.png {CLASSIFY}",
        lambda: Path("bad.mp4").write_bytes(video(ramp(20))[:-300]),
        ["bad.mp4: the video ends early (an MP4 without its index, moov)"], prints("red.png,")),
    Row("a bomb of a video", f"classify bad.mov red.png {CLASSIFY}", bomb,
        [re.compile(r"error: bad\.mov: no frames \(0 decoded, 2 failed")], prints("red.png,")),
    Row("a hole in a video", f"classify bad.mov red.png {CLASSIFY} --every_s 0.1", holed,
        [re.compile(r"warning: bad\.mov: damaged: undecodable frames \(0\.\d+ to \d\.\d+ s\)")],
        prints("red.png,", "bad.mov @ 0 s,", "bad.mov @ 1.9 s,"), code=0),
    Row("a missing video", f"classify bad.mp4 red.png {CLASSIFY}", None,
        ["bad.mp4: no image found (no such file)"], prints("red.png,")),
    Row("frames in two ways", "index red.png -m {clip} -o out/index --every_s 1 --scenes 0.5", None,
        ["--scenes 0.5: cannot be combined with every_s"]),
    Row("a text file per frame", "caption bad.mp4 -m {captioner} --format txt-per-image",
        lambda: Path("bad.mp4").write_bytes(video(ramp(2))),
        ["--format txt-per-image without --per_clip: is for images (bad.mp4)"]),
]  # fmt: skip
