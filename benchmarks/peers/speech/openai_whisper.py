"""openai-whisper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.speech.whisper_files import GREEDY, expect, inputs, segment_tokens, wave
from benchmarks.peers.speech.whisper_files import recordings as cut


def loaded(folder: Path, device: str) -> nn.Module:
    import whisper

    return whisper.load_model(str(folder / "openai.pt"), device=device)


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    import whisper

    samples = torch.from_numpy(wave(folder)).to(device)
    return lambda: whisper.log_mel_spectrogram(samples)


def encoder(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    model, mel = loaded(folder, device), inputs(folder, device)["mel"]
    return torch.inference_mode()(lambda: model.encoder(mel))


def decoder(
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1, source: str = "frames",
    compared: int | None = None, **other: Any,
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """Decode without logits processors; the weights make the end unlikely."""
    import whisper

    model, states = loaded(folder, device), inputs(folder, device)[source]
    options = whisper.DecodingOptions(
        language="en", without_timestamps=True, sample_len=tokens, suppress_tokens="", suppress_blank=False,
        fp16=kind == "float16", beam_size=beams if beams > 1 else None,
    )  # fmt: skip
    return lambda: [expect(one.tokens, tokens, compared) for one in whisper.decode(model, states, options)]


def end_to_end(
    folder: Path, device: str, tokens: int, file: str = "speech.wav", count: int | None = None, **other: Any
) -> Callable[[], list[int]]:
    """Transcribe a file, which the program ffmpeg reads."""
    model, limits = loaded(folder, device), GREEDY | {"sample_len": tokens, "logprob_threshold": None, "fp16": False}
    return lambda: expect(segment_tokens(model.transcribe(str(folder / file), **limits)), count)


def calls(
    folder: Path, device: str, tokens: int, recordings: int, beams: int, **other: Any
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """`model.transcribe` of each array in turn."""
    beam = {"beam_size": beams} if beams > 1 else {}
    model, limits = loaded(folder, device), GREEDY | {"sample_len": tokens, "logprob_threshold": None, "fp16": False}
    waves = cut(folder, recordings)
    return lambda: [expect(segment_tokens(model.transcribe(one, **limits, **beam)), tokens) for one in waves]
