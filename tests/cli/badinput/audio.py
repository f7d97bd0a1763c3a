"""Audio files with false headers, references to other files, or several tracks."""

import io
import re
import struct
from pathlib import Path

import av
import numpy as np

from .rows import Row, prints, wrote

RUN = "-m {asr} -o out -f txt"


def claims(name: str, rate: int = 16000, channels: int = 1) -> None:
    data = b"\1\0\xff\xff" * 4000
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * 2 & 0xFFFFFFFF, 2 * channels & 0xFFFF, 16)
    chunks = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    Path(name).write_bytes(b"RIFF" + struct.pack("<I", len(chunks)) + chunks)


def film() -> None:
    """Two audio tracks, the first silent."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        streams = [container.add_stream("pcm_s16le", rate=16000, layout="mono") for _ in range(2)]
        for stream, gain in zip(streams, (0, 8000), strict=True):
            sound = (np.sin(np.arange(16000) * 0.2) * gain).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(sound[None], format="s16", layout="mono")
            frame.sample_rate, frame.pts = 16000, 0
            container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    Path("film.mkv").write_bytes(file.getvalue())


def backwards() -> None:
    """A CAF whose chunk has a negative size: FFmpeg seeks before the file's start."""
    data = b"caff\0\1\0\0desc" + struct.pack(">qd4sIIIII", 32, 48000.0, b"lpcm", 2, 2, 1, 1, 16)
    Path("bad.caf").write_bytes(data + b"chan" + bytes.fromhex("0d81215aef2def2b1dae31ae4477"))


ROWS = [
    Row("a seek before the start", f"transcribe bad.caf tone.wav {RUN}", backwards,
        [re.compile(r"error: bad\.caf: ")], wrote("tone.txt")),
    Row("implausible rate between good files", f"transcribe tone.wav srmax.wav red.wav {RUN}",
        lambda: (claims("srmax.wav", 2147483647), Path("red.wav").write_bytes(Path("tone.wav").read_bytes())),
        ["srmax.wav: sample rate 2147483647 Hz, expected 1,000 to 3,072,000"], wrote("tone.txt", "red.txt")),
    Row("one sample a second", f"transcribe slow.wav tone.wav {RUN}", lambda: claims("slow.wav", 1),
        ["slow.wav: sample rate 1 Hz, expected 1,000 to 3,072,000"], wrote("tone.txt")),
    Row("65,535 channels", f"transcribe many.wav tone.wav {RUN}", lambda: claims("many.wav", channels=65535),
        [re.compile(r"many\.wav: ")], wrote("tone.txt")),
    Row("a playlist named .mp3", f"transcribe list.mp3 tone.wav {RUN}",
        lambda: Path("list.mp3").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\ntone.wav\n#EXT-X-ENDLIST\n"),
        [re.compile(r"list\.mp3: not a readable recording")], wrote("tone.txt")),
    Row("a silent first track", f"transcribe film.mkv {RUN}", film,
        [re.compile(r"warning: film\.mkv: audio track 1 of 2 is silent, track 2 is not; audio_track selects")],
        wrote("film.txt"), code=0),
    Row("the second track", f"transcribe film.mkv {RUN} --audio_track 2", film, (), wrote("film.txt")),
    Row("no such track", f"transcribe film.mkv tone.wav {RUN} --audio_track 3", film,
        ["film.mkv: no audio track 3, only 2 (1 pcm_s16le 1 ch, 2 pcm_s16le 1 ch)",
         "tone.wav: no audio track 3, only 1 (1 pcm_s16le 1 ch)"], wrote()),
    Row("track 0", f"transcribe film.mkv {RUN} --audio_track 0", film, [re.compile("--audio_track")], wrote(), code=2),
    Row("a stream at 999 Hz", "transcribe - --stream --rate 999 -m {asr}", None,
        [re.compile("--rate.*999")], wrote(), code=2),
    Row("a NUL in a path", ["transcribe", "a\0b.wav", "tone.wav", "-m", "{asr}", "-o", "out", "-f", "txt"], None,
        [re.compile("NUL")], wrote("tone.txt")),
    Row("a name longer than any", f"transcribe {'x' * 5000}.wav tone.wav {RUN}", None, [re.compile("name too long")],
        wrote("tone.txt")),
    Row("a missing file of the same name", f"transcribe gone/tone.wav tone.wav {RUN}", None,
        ["gone/tone.wav: no such file (cannot be opened)"], wrote("tone.txt")),
    Row("an image's name longer than any", f"classify {'x' * 5000}.png red.png --labels a,b -m {{clip}} --format csv",
        None, [re.compile("no such file|name too long")], prints("red.png,")),
]  # fmt: skip
