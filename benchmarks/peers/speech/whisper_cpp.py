"""whisper.cpp through pywhispercpp."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.speech.whisper_files import expect, samples, threads


def end_to_end(
    folder: Path, device: str, tokens: int, kind: str = "float32", file: str = "speech.wav", count: int | None = None,
    **other: Any,
) -> Callable[[], list[int]]:  # fmt: skip
    """Transcribe a file; its samples are read by Python's `wave`, once a run."""
    import _pywhispercpp as library

    own = library.whisper_context_default_params()
    own.use_gpu = False
    own.flash_attn = kind == "int8"  # the default; with it half of the tokens of float16 are others
    model = library.whisper_init_from_file_with_params(str(folder / f"{kind}.ggml"), own)
    options = library.whisper_full_default_params(library.whisper_sampling_strategy.WHISPER_SAMPLING_GREEDY)
    options.n_threads, options.language, options.greedy = threads(), "en", {"best_of": 1}
    options.no_timestamps = options.no_context = options.single_segment = options.suppress_nst = True
    options.print_progress, options.temperature_inc, options.max_tokens = False, 0.0, tokens - 1

    def run() -> list[int]:
        wave = samples(folder / file)
        if code := library.whisper_full(model, options, wave, len(wave)):
            raise RuntimeError(f"whisper_full returned {code}")
        found = [
            library.whisper_full_get_token_id(model, segment, at)
            for segment in range(library.whisper_full_n_segments(model))
            for at in range(library.whisper_full_n_tokens(model, segment))
        ]
        return expect(found, count)

    return run
