"""Decoders alone, and the recordings."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

CODECS = {"flac": ("flac", "s16"), "mp3": ("libmp3lame", "fltp")}


def images(folder: Path, device: str, **_: Any) -> Callable[[], list[int]]:
    """Decode every JPEG from memory; return the number of values."""
    import io

    from PIL import Image

    files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
    return lambda: [np.asarray(Image.open(io.BytesIO(file))).size for file in files]


def sound(folder: Path, device: str, file: str, **_: Any) -> Callable[[], list[int]]:
    """Decode a recording; return the number of samples."""
    import av

    def run() -> list[int]:
        with av.open(str(folder / file)) as container:
            return [sum(frame.to_ndarray().size for frame in container.decode(audio=0))]

    return run


def prepare_sound(folder: Path, device: str, seconds: int, file: str, **_: Any) -> None:
    """The shipped sample repeated, at the rate and in the format of `file`, such as 44100.mp3."""
    import av

    from benchmarks.suite.process import ROOT

    rate, (codec, layout) = int(Path(file).stem), CODECS[Path(file).suffix[1:]]
    resampler = av.AudioResampler(format=layout, layout="mono", rate=rate)
    with av.open(str(ROOT / "assets" / "sample" / "speech.flac")) as container:
        frames = [made for frame in container.decode(audio=0) for made in resampler.resample(frame)]
    once = np.concatenate([frame.to_ndarray() for frame in (*frames, *resampler.resample(None))], axis=1)
    samples = np.tile(once, -(-seconds * rate // once.shape[1]))[:, : seconds * rate]
    with av.open(str(folder / file), "w") as out:
        stream = out.add_stream(codec, rate=rate, layout="mono", format=layout)
        step = stream.codec_context.frame_size or 4096
        for start in range(0, samples.shape[1], step):
            part = np.ascontiguousarray(samples[:, start : start + step])
            frame = av.AudioFrame.from_ndarray(part, format=layout, layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
