"""A recording of any length for a Whisper with random weights."""

from pathlib import Path
from typing import Any

RATE = 16000
REPEATED = 60  # seconds of the stream that long recordings repeat
PADDING = 2304  # samples that an mp3 encoder may add to a stream


def prepare(folder: Path, device: str, size: str, seconds: int, tiny: bool = False, **_: Any) -> None:
    """`speech.mp3` beside what `whisper_random.prepare` writes: a stream of at most a minute, repeated. It has no
    header, so that streams can be concatenated."""
    import av

    from benchmarks.peers.speech import whisper_random

    whisper_random.prepare(folder, device, size, tiny, libraries=("openai", "ctranslate2"))
    once = min(seconds, REPEATED)
    samples = whisper_random.speech(once - PADDING / RATE).numpy()
    path = folder / "once.mp3"
    with av.open(str(path), "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"}) as out:
        stream = out.add_stream("libmp3lame", rate=RATE, layout="mono", bit_rate=48000)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    with (folder / "speech.mp3").open("wb") as file:
        for _ in range(seconds // once):
            file.write(path.read_bytes())
