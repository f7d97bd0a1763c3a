"""Ours on every growth curve, from the same files as the peers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.peers.growth.audio import OPTIONS, TOKENS
from benchmarks.peers.growth.images import TEMPLATE, files, in_order, labels
from benchmarks.peers.vision.openclip import pixels
from multimodal import classify, load, transcribe
from multimodal.inference.prepare import prepare_for_inference
from multimodal.weights.vision import vit_timm


def scores(folder: Path, device: str, kind: str, **_: Any) -> Callable[[], Any]:
    names, pictures = labels(folder), files(folder)
    checkpoint = prepare_for_inference(load(str(folder / "open_clip")), kind, device)

    def run() -> Any:
        """[images, labels]"""
        found = classify(pictures, names, checkpoint, templates=[TEMPLATE])
        return in_order([one["scores"] for one in found], names)

    return run


def sound(folder: Path, device: str, kind: str, **_: Any) -> Callable[[], list[int]]:
    checkpoint = prepare_for_inference(load(str(folder / "ours")), kind, device)
    limits = {"sample_len": TOKENS, "logprob_threshold": None, "remove_repetitions": False}

    def run() -> list[int]:
        found = transcribe(str(folder / "speech.mp3"), checkpoint, **limits, **OPTIONS)
        return [token for segment in found["segments"] for token in segment["tokens"]]

    return run


def conformer(folder: Path, device: str, **_: Any) -> Callable[[], str]:
    """The shipped recognizer with CTC's best path."""
    checkpoint = prepare_for_inference(load("asr-conformer-en"), device=device)

    def run() -> str:
        return transcribe(str(folder / "speech.mp3"), checkpoint, beam_size=1)["text"]

    return run


def vit(folder: Path, device: str, name: str, kind: str, **sizes: Any) -> Callable[[], Tensor]:
    """[B classes]"""
    tensors = load_file(folder / "timm.safetensors")
    plain = vit_timm.FAMILY.load(tensors, {"architecture": name, "model_args": sizes["args"]}, f"random {name}")
    model, images = prepare_for_inference(plain, kind, device).model, pixels(folder, device)

    @torch.inference_mode()
    def run() -> Tensor:
        return model(images)

    return run
