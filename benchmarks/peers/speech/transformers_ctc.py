"""transformers' wav2vec 2.0."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.speech.whisper_files import letters, samples


def ctc(folder: Path, device: str, kind: str = "float32", **other: Any) -> Callable[[], list[int]]:
    """Transcribe a file; its samples are read by Python's `wave`."""
    from transformers import Wav2Vec2ForCTC, Wav2Vec2Processor

    processor = Wav2Vec2Processor.from_pretrained(folder / "hub")
    model = Wav2Vec2ForCTC.from_pretrained(folder / "hub").eval().requires_grad_(False)

    @torch.inference_mode()
    def run() -> list[int]:
        inputs = processor(samples(folder / "speech.wav"), sampling_rate=16000, return_tensors="pt")
        return letters(processor.batch_decode(model(**inputs).logits.argmax(-1))[0])

    return run
