"""A Whisper with random weights and a recording of any length, and openai-whisper and faster-whisper from file to
tokens: one greedy attempt per window, `TOKENS` tokens each, without timestamps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS = 24
RATE = 16000
REPEATED = 60  # seconds of the stream that long recordings repeat
PADDING = 2304  # samples that an mp3 encoder may add to a stream
OPTIONS = {"language": "en", "temperature": 0.0, "without_timestamps": True, "condition_on_previous_text": False,
           "compression_ratio_threshold": None, "no_speech_threshold": None}  # fmt: skip


def prepare(folder: Path, device: str, size: str, seconds: int, tiny: bool = False, **_: Any) -> None:
    """`speech.mp3` beside what `whisper_random.prepare` writes: a stream of at most a minute, repeated."""
    from benchmarks.peers.speech import whisper_random

    whisper_random.prepare(folder, device, size, tiny, libraries=("openai", "ctranslate2"))
    once = min(seconds, REPEATED)
    save_mp3(folder / "once.mp3", whisper_random.speech(once - PADDING / RATE).numpy())
    stream = (folder / "once.mp3").read_bytes()
    with (folder / "speech.mp3").open("wb") as file:
        for _ in range(seconds // once):
            file.write(stream)


def save_mp3(path: Path, samples: Any) -> None:
    """Without a header, so that streams can be concatenated."""
    import av

    with av.open(str(path), "w", format="mp3", options={"write_xing": "0", "id3v2_version": "0"}) as out:
        stream = out.add_stream("libmp3lame", rate=RATE, layout="mono", bit_rate=48000)
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def openai_whisper(folder: Path, device: str, **_: Any) -> Callable[[], list[int]]:
    """Reads the file with the program ffmpeg."""
    from benchmarks.peers.speech.openai_whisper import loaded

    model = loaded(folder, device)

    def run() -> list[int]:
        found = model.transcribe(
            str(folder / "speech.mp3"), fp16=False, sample_len=TOKENS, logprob_threshold=None, **OPTIONS
        )
        return [token for segment in found["segments"] for token in segment["tokens"]]

    return run


def faster_whisper(folder: Path, device: str, kind: str, **_: Any) -> Callable[[], list[int]]:
    from benchmarks.peers.speech.faster_whisper import loaded

    model = loaded(folder, device, kind)
    tokens = 2 * TOKENS - 4  # CTranslate2 halves the limit, after the four ids of the prompt were added

    def run() -> list[int]:
        segments, _ = model.transcribe(
            str(folder / "speech.mp3"), beam_size=1, max_new_tokens=tokens, log_prob_threshold=None, **OPTIONS
        )
        return [token for segment in segments for token in segment.tokens]

    return run
