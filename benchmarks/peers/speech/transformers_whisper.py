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
    return torch.inference_mode()(lambda: model.model.encoder(mel).last_hidden_state)


def decoder(
    folder: Path, device: str, tokens: int, kind: str = "float32", source: str = "frames", compared: int | None = None,
    **other: Any,
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """Decode without logits processors; the weights make the end unlikely."""
    from transformers.modeling_outputs import BaseModelOutput

    dtype = getattr(torch, kind)
    model, states = loaded(folder, device, dtype), inputs(folder, device)[source].to(dtype)
    ids = torch.tensor([about(folder)["prompt"]] * len(states), device=device)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None

    @torch.inference_mode()
    def run() -> list[list[int]]:
        frames = model.model.encoder(states).last_hidden_state if source == "mel" else states
        found = model.generate(
            encoder_outputs=BaseModelOutput(frames), decoder_input_ids=ids, max_new_tokens=tokens, do_sample=False,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        return [expect(row[-tokens:], tokens, compared) for row in found.tolist()]

    return run


def end_to_end(folder: Path, device: str, tokens: int, **other: Any) -> Callable[[], list[int]]:
    """The pipeline on a file, which the program ffmpeg reads. It returns text: the tokens are the model's output."""
    from transformers import WhisperFeatureExtractor, WhisperTokenizer, pipeline
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = loaded(folder, device)
    recognizer = pipeline(
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
        recognizer(str(folder / "speech.wav"), generate_kwargs=options)
        ids = seen[0]["tokens"] if isinstance(seen[0], dict) else seen[0]
        return expect(ids[0].tolist()[-tokens:], tokens)

    return run
