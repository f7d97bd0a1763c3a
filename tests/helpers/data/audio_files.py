"""Makers of audio files."""

import functools
import io
import struct
import wave

import av
import numpy as np
import pytest

from multimodal.errors import AudioError
from multimodal.system.assets import asset
from multimodal.tokens.audio.reading import read_audio


@functools.cache
def first_words(count: int = 54_400) -> bytes:
    """A WAV file of the sample recording's first sentence, which takes half the time of the whole, or of fewer of its
    samples."""
    samples, file = read_audio(asset("sample", "speech.flac"))[:count], io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setparams((1, 2, 16_000, 0, "NONE", ""))
        made.writeframes((samples * 32768).short().numpy().tobytes())
    return file.getvalue()


def chirp(rate: int, seconds: float = 3.0) -> np.ndarray:
    """A sweep from 200 Hz up to 2 kHz: a shift of one sample shows in its correlation."""
    at = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * (200 * at + 300 * at**2))).astype(np.float32)


def encode(sound: np.ndarray, rate: int, form: str, codec: str, layout: str = "mono", image: bool = False,
           options: dict | None = None) -> bytes:  # fmt: skip
    """A file's bytes, written by PyAV in frames of 20 ms; `sound` is (samples,) or (channels, samples)."""
    sound, file, step = np.atleast_2d(sound), io.BytesIO(), rate // 50
    with av.open(file, "w", format=form) as container:
        video = container.add_stream("mpeg4", rate=10, width=64, height=64, pix_fmt="yuv420p") if image else None
        stream = container.add_stream(codec, rate=rate, layout=layout, options=options or {})
        if video:
            for index in range(10):
                frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
                frame.pts = index
                container.mux(video.encode(frame))
            container.mux(video.encode(None))
        for start in range(0, sound.shape[1], step):
            part = np.ascontiguousarray(sound[:, start : start + step])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def wav(sound: np.ndarray, rate: int = 16000) -> bytes:
    """16-bit PCM by the standard library, without PyAV on the writing side."""
    sound, file = np.atleast_2d(sound), io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(len(sound))
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((sound.T * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


LOSSY = [
    ("mp3", "libmp3lame", 44100),
    ("ogg", "libopus", 48000),
    ("ipod", "aac", 44100),
    ("mp4", "aac", 48000),
    ("webm", "libopus", 48000),
]


def refused(source, *parts: str) -> None:
    with pytest.raises(AudioError) as caught:
        read_audio(source)
    text = str(caught.value)
    assert [part for part in parts if part not in text] == [], text
    assert "\n" not in text


def float_wav(sound: np.ndarray, rate: int = 16000) -> bytes:
    data = sound.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32)
    chunks = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks
