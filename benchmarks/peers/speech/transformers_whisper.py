"""transformers' Whisper, and its pipeline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.speech.whisper_files import about, expect, inputs


def loaded(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(folder / "transformers", dtype=dtype).to(device).eval()


def encoder(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    model, mel = loaded(folder, device), inputs(folder, device)["mel"]

    @torch.inference_mode()
    def run() -> Tensor:
        return model.model.encoder(mel).last_hidden_state

    return run


def decoder(folder: Path, device: str, tokens: int, **other: Any) -> Callable[[], list[int]]:
    """Decode encoded frames without logits processors; the weights make the end unlikely."""
    from transformers.modeling_outputs import BaseModelOutput

    model, frames, prompt = loaded(folder, device), inputs(folder, device)["frames"], about(folder)["prompt"]
    ids = torch.tensor([prompt], device=device)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None

    def run() -> list[int]:
        found = model.generate(
            encoder_outputs=BaseModelOutput(frames), decoder_input_ids=ids, max_new_tokens=tokens, do_sample=False,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        return expect(found[0].tolist()[-tokens:], tokens)

    return run


def end_to_end(folder: Path, device: str, tokens: int, **other: Any) -> Callable[[], list[int]]:
    """The pipeline on a file, which it lets the program ffmpeg read. It returns text, so
    tokens are taken from the model's output."""
    from transformers import WhisperFeatureExtractor, WhisperTokenizer, pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = loaded(folder, device)
    recogniser = pipeline(
        "automatic-speech-recognition", model, device=device,
        feature_extractor=WhisperFeatureExtractor.from_pretrained(folder / "transformers"),
        tokenizer=WhisperTokenizer.from_pretrained(folder / "transformers"),
    )  # fmt: skip
    seen, generate = [], model.generate

    def watched(*args: Any, **named: Any) -> Any:
        seen.append(generate(*args, **named))
        return seen[-1]

    model.generate = watched
    options = {"language": "en", "task": "transcribe", "max_new_tokens": tokens, "do_sample": False, "num_beams": 1}

    def run() -> list[int]:
        seen.clear()
        recogniser(str(folder / "speech.wav"), generate_kwargs=options)
        ids = seen[0]["tokens"] if isinstance(seen[0], dict) else seen[0]
        return expect(ids[0].tolist()[-tokens:], tokens)

    return run
