"""faster-whisper, on CTranslate2's weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.speech.whisper_files import expect, threads, wave


def loaded(folder: Path, device: str, kind: str) -> Any:
    from faster_whisper import WhisperModel

    return WhisperModel(str(folder / "ctranslate2"), device, compute_type=kind, cpu_threads=threads(), num_workers=1)


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], np.ndarray]:
    from faster_whisper.feature_extractor import FeatureExtractor

    extract, sound = FeatureExtractor(), wave(folder)
    return lambda: extract(sound, padding=0)


def _options(tokens: int) -> dict[str, Any]:
    """One greedy attempt without timestamps. faster-whisper halves its limit after adding the prompt's four ids."""
    return {"language": "en", "temperature": 0.0, "beam_size": 1, "without_timestamps": True,
            "compression_ratio_threshold": None, "log_prob_threshold": None, "no_speech_threshold": None,
            "max_new_tokens": 2 * tokens - 4}  # fmt: skip


def end_to_end(folder: Path, device: str, tokens: int, kind: str = "float32", **other: Any) -> Callable[[], list[int]]:
    """Transcribe a file, read with PyAV."""
    model, options = loaded(folder, device, kind), _options(tokens)

    def run() -> list[int]:
        segments, _ = model.transcribe(str(folder / "speech.wav"), **options)
        return expect([token for segment in segments for token in segment.tokens], tokens)

    return run


def batched(
    folder: Path, device: str, tokens: int, windows: int, batch: int, kind: str = "float32", **other: Any
) -> Callable[[], list[int]]:
    """Windows of 30 s, `batch` at a time."""
    from faster_whisper import BatchedInferencePipeline

    model, options = BatchedInferencePipeline(loaded(folder, device, kind)), _options(tokens)
    clips = [{"start": 30.0 * i, "end": 30.0 * (i + 1)} for i in range(windows)]

    def run() -> list[int]:
        segments, _ = model.transcribe(str(folder / "speech.wav"), batch_size=batch, clip_timestamps=clips, **options)
        return expect([token for segment in segments for token in segment.tokens], windows * tokens)

    return run
