"""Our Whisper, from our checkpoint folder, and the shipped recognizer."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.cuda.common import ready
from benchmarks.peers.speech.whisper_files import GREEDY, about, expect, inputs, letters, segment_tokens, wave
from benchmarks.peers.speech.whisper_files import recordings as cut
from multimodal import Transcriber, load, transcribe
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search
from multimodal.inference import cuda_graphs
from multimodal.inference.prepare import prepare_for_inference
from multimodal.tokens.audio.log_mel import log_mel as mel_of
from multimodal.weights.folder import Checkpoint, load_folder


def loaded(folder: Path, device: str, kind: str) -> Checkpoint:
    return prepare_for_inference(load_folder(folder / "ours"), kind, torch.device(device))


def log_mel(folder: Path, device: str, **other: Any) -> Callable[[], Tensor]:
    samples = torch.from_numpy(wave(folder)).to(device)
    return torch.inference_mode()(lambda: mel_of(samples))


def encoder(folder: Path, device: str, kind: str = "float32", **other: Any) -> Callable[[], Tensor]:
    model, mel = loaded(folder, device, kind).model, inputs(folder, device)["mel"]
    return torch.inference_mode()(lambda: model.encoder(mel))


def decoder(
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1, source: str = "frames",
    compared: int | None = None, graph: bool = False, **other: Any,
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """Decode without logits processors; the weights make the end unlikely. `graph`: as CUDA graphs where
    `prepare_for_inference` put them in place."""
    made = loaded(folder, device, kind)
    model, states, prompt = made.model, inputs(folder, device)[source], about(folder)["prompt"]
    ids, room = torch.tensor([prompt] * len(states), device=device), len(prompt) + tokens
    find = sampling.greedy if beams == 1 else partial(beam_search, beams=beams)

    @torch.inference_mode()
    def run() -> list[list[int]]:
        frames = model.encoder(states) if source == "mel" else states
        if graph:
            step, cache = cuda_graphs.fast_step(model.decoder, frames, None, room, last=1)
        else:
            step = sampling.cross_attention_step(partial(model.decoder, last=1), frames)
            cache = model.decoder.new_cache(capacity=room)
        rows = find(step, ids, cache, eos=made.tokenizer.eot, max_new=tokens).ids
        return [expect(row, tokens, compared) for row in rows]

    return ready(run, device)


def end_to_end(
    folder: Path, device: str, tokens: int, kind: str = "float32", file: str = "speech.wav", count: int | None = None,
    windows: int = 0, batch: int = 0, **other: Any,
) -> Callable[[], list[int]]:  # fmt: skip
    """Transcribe a file; with `batch` windows of 30 s, so many at once."""
    made = loaded(folder, device, {"bfloat16": "auto"}.get(kind, kind))  # the encoder alone is in bfloat16
    options = GREEDY | {"sample_len": tokens, "logprob_threshold": None, "remove_repetitions": False}
    if batch:
        clips = [30.0 * (i + j) for i in range(windows) for j in (0, 1)]
        options |= {"batched": True, "batch_size": batch, "clip_timestamps": clips}
    return lambda: expect(segment_tokens(transcribe(folder / file, made, **options)), count)


def calls(
    folder: Path, device: str, tokens: int, recordings: int, beams: int, many: bool, kind: str = "float32", **other: Any
) -> Callable[[], list[list[int]]]:  # fmt: skip
    """`Transcriber` called with each array in turn, or with `many` of them."""
    beam = {"beam_size": beams} if beams > 1 else {}
    transcriber = Transcriber(
        folder / "ours", device=device, compute_type=kind, sample_len=tokens,
        logprob_threshold=None, remove_repetitions=False, **GREEDY, **beam,
    )  # fmt: skip
    waves = cut(folder, recordings)

    def run() -> list[list[int]]:
        found = [result for _, result in transcriber.many(waves)] if many else map(transcriber, waves)
        return [expect(segment_tokens(one), tokens) for one in found]

    return run


def conformer(folder: Path, device: str, file: str, **other: Any) -> Callable[[], str]:
    """The shipped recognizer with CTC's best path."""
    made = prepare_for_inference(load("asr-conformer-en"), device=device)
    return lambda: transcribe(folder / file, made, beam_size=1)["text"]


def ctc(folder: Path, device: str, kind: str = "float32", **other: Any) -> Callable[[], list[int]]:
    """Transcribe a file by transformers' wav2vec 2.0."""
    transcriber = Transcriber(folder / "hub", device=device, compute_type=kind)
    return lambda: letters(transcriber(folder / "speech.wav")["text"])
