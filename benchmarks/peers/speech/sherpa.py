"""sherpa-onnx, with a wav2vec 2.0 in the place of Omnilingual ASR's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.speech.whisper_files import letters, samples, threads


def ctc(folder: Path, device: str, kind: str = "float32", **other: Any) -> Callable[[], list[int]]:
    """Transcribe a file; its samples are read by Python's `wave`."""
    import sherpa_onnx

    recognizer = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
        str(folder / f"{kind}.onnx"), str(folder / "tokens.txt"), num_threads=threads()
    )

    def run() -> list[int]:
        stream = recognizer.create_stream()
        stream.accept_waveform(16000, samples(folder / "speech.wav"))
        recognizer.decode_stream(stream)
        return letters("".join(stream.result.tokens))

    return run
