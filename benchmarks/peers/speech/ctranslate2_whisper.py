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
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1, source: str = "frames",
    compared: int | None = None, **other: Any,
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """Decode without logits processors; the weights make the end unlikely."""
    model, states = loaded(folder, device, kind), view(folder, source)
    prompts = [about(folder)["prompt"]] * states.shape[0]

    def run() -> list[list[int]]:
        found = model.generate(  # it decodes half of max_length
            model.encode(states) if source == "mel" else states, prompts, beam_size=beams, max_length=2 * tokens,
            suppress_blank=False, suppress_tokens=[],
        )  # fmt: skip
        return [expect(one.sequences_ids[0], tokens, compared) for one in found]

    return run
