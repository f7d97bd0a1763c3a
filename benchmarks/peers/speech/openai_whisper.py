"""openai-whisper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.speech.whisper_files import expect, inputs, wave


def loaded(folder: Path, device: str) -> nn.Module:
    import whisper

    return whisper.load_model(str(folder / "openai.pt"), device=device)


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    import whisper

    sound = torch.from_numpy(wave(folder)).to(device)
    return lambda: whisper.log_mel_spectrogram(sound)


def encoder(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    model, mel = loaded(folder, device), inputs(folder, device)["mel"]

    @torch.inference_mode()
    def run() -> Tensor:
        return model.encoder(mel)

    return run


def decoder(folder: Path, device: str, tokens: int, beams: int = 1, **other: Any) -> Callable[[], list[int]]:
    """Decode encoded frames without logits processors; the weights make the end unlikely."""
    import whisper

    model, frames = loaded(folder, device), inputs(folder, device)["frames"]
    options = whisper.DecodingOptions(
        language="en", without_timestamps=True, sample_len=tokens, suppress_tokens="", suppress_blank=False,
        fp16=False, beam_size=beams if beams > 1 else None,
    )  # fmt: skip
    return lambda: expect(whisper.decode(model, frames, options)[0].tokens, tokens)


def end_to_end(folder: Path, device: str, tokens: int, **other: Any) -> Callable[[], list[int]]:
    """Transcribe a file, read by the program ffmpeg: one greedy attempt without timestamps."""
    model = loaded(folder, device)
    limits = {"temperature": 0.0, "compression_ratio_threshold": None, "logprob_threshold": None,
              "no_speech_threshold": None}  # fmt: skip

    def run() -> list[int]:
        found = model.transcribe(
            str(folder / "speech.wav"), language="en", without_timestamps=True, sample_len=tokens, fp16=False, **limits
        )
        return expect([token for segment in found["segments"] for token in segment["tokens"]], tokens)

    return run
