"""Windows of 30 s through encoder and greedy decoding on a GPU: transformers, openai-whisper, CTranslate2."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.cuda.common import ready
from benchmarks.peers.speech import openai_whisper, transformers_whisper
from benchmarks.peers.speech.whisper_files import about, expect, inputs

SEEN = 4  # compared tokens per window: with random weights all tokens after a different one differ


def first(rows: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The compared tokens."""
    return [expect(list(row), tokens)[:SEEN] for row in rows]


def transformers(folder: Path, device: str, tokens: int, kind: str, **other: Any) -> Callable[[], list[list[int]]]:
    from transformers.modeling_outputs import BaseModelOutput

    dtype = getattr(torch, kind)
    model = transformers_whisper.loaded(folder, device, dtype)
    mel, prompt = inputs(folder, device)["mel"].to(dtype), about(folder)["prompt"]
    ids = torch.tensor([prompt] * len(mel), device=device)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None

    @torch.inference_mode()
    def run() -> list[list[int]]:
        found = model.generate(
            encoder_outputs=BaseModelOutput(model.model.encoder(mel).last_hidden_state), decoder_input_ids=ids,
            max_new_tokens=tokens, do_sample=False, suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        return first(found[:, -tokens:].tolist(), tokens)

    return ready(run, device)


def openai(folder: Path, device: str, tokens: int, kind: str, **other: Any) -> Callable[[], list[list[int]]]:
    import whisper

    model, mel = openai_whisper.loaded(folder, device), inputs(folder, device)["mel"]
    options = whisper.DecodingOptions(
        language="en", without_timestamps=True, sample_len=tokens, suppress_tokens="", suppress_blank=False,
        fp16=kind == "float16",
    )  # fmt: skip
    return ready(lambda: first([one.tokens for one in whisper.decode(model, mel, options)], tokens), device)


def ctranslate2(folder: Path, device: str, tokens: int, kind: str, **other: Any) -> Callable[[], list[list[int]]]:
    """The engine of faster-whisper."""
    from benchmarks.peers.speech.ctranslate2_whisper import loaded, view

    model, mel, prompt = loaded(folder, device, kind), view(folder, "mel"), about(folder)["prompt"]
    count = mel.shape[0]

    def run() -> list[list[int]]:
        found = model.generate(  # it decodes half of max_length
            model.encode(mel), [prompt] * count, beam_size=1, max_length=2 * tokens, suppress_blank=False,
            suppress_tokens=[],
        )  # fmt: skip
        return first([one.sequences_ids[0] for one in found], tokens)

    return ready(run, device)
