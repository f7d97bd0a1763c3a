"""Our Whisper, from our checkpoint folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.speech.whisper_files import about, expect, inputs, wave
from multimodal import transcribe
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.inference.prepare import prepare_for_inference
from multimodal.tokens.audio.log_mel import log_mel as mel_of
from multimodal.weights.folder import Checkpoint, load_folder


def loaded(folder: Path, device: str, kind: str) -> Checkpoint:
    return prepare_for_inference(load_folder(folder / "ours"), kind, torch.device(device))


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    sound = torch.from_numpy(wave(folder)).to(device)
    return lambda: mel_of(sound)


def encoder(folder: Path, device: str, kind: str = "float32", **other: Any) -> Callable[[], Tensor]:
    model, mel = loaded(folder, device, kind).model, inputs(folder, device)["mel"]

    @torch.inference_mode()
    def run() -> Tensor:
        return model.encoder(mel)

    return run


def decoder(
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1, **other: Any
) -> Callable[[], list[int]]:
    """Decode encoded frames without logits processors; the weights make the end unlikely."""
    made, prompt = loaded(folder, device, kind), about(folder)["prompt"]
    model, eot = made.model.decoder, made.tokenizer.eot
    frames, ids = inputs(folder, device)["frames"], torch.tensor([prompt], device=device)
    find = sampling.greedy if beams == 1 else partial(beam_search, beams=beams)

    @torch.inference_mode()
    def run() -> list[int]:
        step = sampling.cross_attention_step(partial(model, last=1), frames)
        cache = model.new_cache(capacity=len(prompt) + tokens)
        return expect(find(step, ids, cache, eos=eot, max_new=tokens).ids[0], tokens)

    return run


def end_to_end(folder: Path, device: str, tokens: int, kind: str = "float32", **other: Any) -> Callable[[], list[int]]:
    """Transcribe a file: one greedy attempt without timestamps."""
    return _transcribing(folder, device, kind, tokens, tokens)


def batched(
    folder: Path, device: str, tokens: int, windows: int, batch: int, kind: str = "float32", **other: Any
) -> Callable[[], list[int]]:
    """Windows of 30 s, `batch` at a time."""
    clips = [30.0 * (i + j) for i in range(windows) for j in (0, 1)]
    return _transcribing(
        folder, device, kind, tokens, windows * tokens, batched=True, batch_size=batch, clip_timestamps=clips
    )


def _transcribing(
    folder: Path, device: str, kind: str, tokens: int, count: int, **options: Any
) -> Callable[[], list[int]]:
    made = loaded(folder, device, {"bfloat16": "auto"}.get(kind, kind))  # the encoder alone is in bfloat16
    options |= {"language": "en", "temperature": 0.0, "without_timestamps": True, "sample_len": tokens,
                "compression_ratio_threshold": None, "logprob_threshold": None, "no_speech_threshold": None,
                "remove_repetitions": False}  # fmt: skip

    def run() -> list[int]:
        found = transcribe(folder / "speech.wav", made, **options)
        return expect([token for segment in found["segments"] for token in segment["tokens"]], count)

    return run
