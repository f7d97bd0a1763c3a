"""faster-whisper, on CTranslate2's weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.speech.whisper_files import GREEDY, expect, threads, wave
from benchmarks.peers.speech.whisper_files import recordings as cut


def loaded(folder: Path, device: str, kind: str) -> Any:
    from faster_whisper import WhisperModel

    return WhisperModel(str(folder / "ctranslate2"), device, compute_type=kind, cpu_threads=threads(), num_workers=1)


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], np.ndarray]:
    from faster_whisper.feature_extractor import FeatureExtractor

    extract, samples = FeatureExtractor(), wave(folder)
    return lambda: extract(samples, padding=0)


def end_to_end(
    folder: Path, device: str, tokens: int, kind: str = "float32", file: str = "speech.wav", count: int | None = None,
    windows: int = 0, batch: int = 0, **other: Any,
) -> Callable[[], list[int]]:  # fmt: skip
    """Transcribe a file, read with PyAV; with `batch` windows of 30 s, so many at once."""
    from faster_whisper import BatchedInferencePipeline

    model = loaded(folder, device, kind)
    # CTranslate2 halves the limit, after the four ids of the prompt were added
    options = GREEDY | {"beam_size": 1, "log_prob_threshold": None, "max_new_tokens": 2 * tokens - 4}
    if batch:
        model = BatchedInferencePipeline(model)
        clips = [{"start": 30.0 * i, "end": 30.0 * (i + 1)} for i in range(windows)]
        options |= {"batch_size": batch, "clip_timestamps": clips}

    def run() -> list[int]:
        segments, _ = model.transcribe(str(folder / file), **options)
        return expect((token for segment in segments for token in segment.tokens), count)

    return run


def calls(
    folder: Path, device: str, tokens: int, recordings: int, beams: int, kind: str = "float32", **other: Any
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """`WhisperModel.transcribe` of each array in turn."""
    model, waves = loaded(folder, device, kind), cut(folder, recordings)
    options = GREEDY | {"beam_size": beams, "log_prob_threshold": None, "max_new_tokens": 2 * tokens - 4}

    def run() -> list[list[int]]:
        found = (model.transcribe(one, **options)[0] for one in waves)
        return [expect((token for segment in one for token in segment.tokens), tokens) for one in found]

    return run
