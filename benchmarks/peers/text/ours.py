"""Our text models, from the same folders."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.peers.plain_files import rows
from benchmarks.peers.text.random_models import ids
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.weights.load import load


def loaded(folder: Path, device: str, kind: str) -> nn.Module:
    return prepare_for_inference(load(folder / "hub"), kind, device).model


def writer(
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1
) -> Callable[[], list[list[int]]]:
    """Generate `tokens` per row; no row ends early."""
    model, given = loaded(folder, device, kind), ids(folder, device)
    both = isinstance(model, EncoderDecoder)
    start = torch.full((len(given), 1), model.config.start_id, device=device) if both else given
    tower = model.decoder if both else model

    @torch.inference_mode()
    def run() -> list[list[int]]:
        step = sampling.cross_attention_step(partial(model.decode, last=1), model.encode(given)) if both else (
            lambda new, cache: model(new, cache=cache, last=1))  # fmt: skip
        cache = tower.new_cache(capacity=start.shape[1] + tokens)
        if beams == 1:
            return sampling.greedy(step, start, cache, eos=-1, max_new=tokens).ids
        return beam_search(step, start, cache, eos=-1, max_new=tokens, beams=beams, early_stopping=False,
                    length_penalty=per_token(1.0)).ids  # fmt: skip

    return run


def prefill(folder: Path, device: str, kind: str = "float32") -> Callable[[], Tensor]:
    """Logits after a prompt, with keys and values cached."""
    model, given = loaded(folder, device, kind), ids(folder, device)

    @torch.inference_mode()
    def run() -> Tensor:
        return model(given, cache=model.new_cache(capacity=given.shape[1]), last=1)[:, -1]

    return run


def encoder(folder: Path, device: str, kind: str = "float32") -> Callable[[], Tensor]:
    """States of rows of different lengths."""
    model, texts = loaded(folder, device, kind), rows(folder)

    def run() -> Tensor:
        return torch.cat(encode_ragged(model, texts))

    return run
