"""Our text models, from the same folders."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.peers.cuda.common import ready
from benchmarks.peers.plain_files import rows
from benchmarks.peers.text.random_models import ids
from multimodal.decoding import sampling
from multimodal.decoding.beam_search import beam_search, per_token
from multimodal.inference import cuda_graphs
from multimodal.inference.prepare import prepare_for_inference
from multimodal.inference.text_packing import encode_ragged
from multimodal.models.encoder_decoder import EncoderDecoder
from multimodal.weights.load import load


def loaded(folder: Path, device: str, kind: str) -> nn.Module:
    return prepare_for_inference(load(folder / "hub"), kind, device).model


def writer(
    folder: Path, device: str, tokens: int, kind: str = "float32", beams: int = 1, graph: bool = False
) -> Callable[[], list[list[int]]]:
    """Generate `tokens` per row; no row ends early. `graph`: as CUDA graphs where `prepare_for_inference` put them in
    place."""
    model, prompts = loaded(folder, device, kind), ids(folder, device)
    pair = isinstance(model, EncoderDecoder)
    start = torch.full((len(prompts), 1), model.config.start_id, device=device) if pair else prompts
    decoder, room = model.decoder if pair else model, start.shape[1] + tokens
    decode, find = partial(model.decode if pair else model, last=1), sampling.greedy
    if beams > 1:
        find = partial(beam_search, beams=beams, early_stopping=False, length_penalty=per_token(1.0))

    @torch.inference_mode()
    def run() -> list[list[int]]:
        if graph:
            step, cache = cuda_graphs.fast_step(decoder, None, None, room, last=1)
        else:
            step = sampling.cross_attention_step(decode, model.encode(prompts) if pair else None)
            cache = decoder.new_cache(capacity=room)
        return find(step, start, cache, eos=-1, max_new=tokens).ids

    return ready(run, device)


def prefill(folder: Path, device: str, kind: str = "float32") -> Callable[[], Tensor]:
    """Logits after a prompt, with keys and values cached."""
    model, prompt = loaded(folder, device, kind), ids(folder, device)
    return torch.inference_mode()(lambda: model(prompt, cache=model.new_cache(capacity=prompt.shape[1]), last=1)[:, -1])


def encoder(folder: Path, device: str, kind: str = "float32") -> Callable[[], Tensor]:
    """States of rows of different lengths."""
    model, texts = loaded(folder, device, kind), rows(folder)
    return lambda: torch.cat(encode_ragged(model, texts))
