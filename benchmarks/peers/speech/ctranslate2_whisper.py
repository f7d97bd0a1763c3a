"""CTranslate2's Whisper, converted from float32 to `kind` while loading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.plain_files import array
from benchmarks.peers.speech.whisper_files import about, expect, threads


def loaded(folder: Path, device: str, kind: str) -> Any:
    import ctranslate2

    return ctranslate2.models.Whisper(
        str(folder / "ctranslate2"), device, compute_type=kind, intra_threads=threads(), inter_threads=1
    )


def view(folder: Path, name: str) -> Any:
    import ctranslate2

    return ctranslate2.StorageView.from_array(array(folder, "inputs", name))


def encoder(folder: Path, device: str, kind: str = "float32", **other: Any) -> Callable[[], np.ndarray]:
    model, mel = loaded(folder, device, kind), view(folder, "mel")
    return lambda: np.array(model.encode(mel, to_cpu=True))


def decoder(
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1, **other: Any
) -> Callable[[], list[int]]:
    """Decode encoded frames without logits processors; the weights make the end unlikely."""
    model, frames, prompt = loaded(folder, device, kind), view(folder, "frames"), about(folder)["prompt"]

    def run() -> list[int]:
        # it decodes half of max_length
        found = model.generate(
            frames, [prompt], beam_size=beams, max_length=2 * tokens, suppress_blank=False, suppress_tokens=[]
        )
        return expect(found[0].sequences_ids[0], tokens)

    return run
