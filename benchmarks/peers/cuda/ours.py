"""Ours on a GPU: towers eager, compiled and as CUDA graphs; decoding with and without graphs; a Conformer's CTC."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.peers.cuda import torchaudio as cuda_torchaudio
from benchmarks.peers.cuda.common import ready
from benchmarks.peers.cuda.whisper import first
from benchmarks.peers.speech.whisper_files import about, inputs
from benchmarks.peers.text import random_models as text_random
from benchmarks.peers.vision.openclip import pixels
from benchmarks.peers.vision.ours import checkpoint
from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.decoding import sampling
from multimodal.decoding.ctc import ctc_greedy
from multimodal.inference import cuda_graphs
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.models.text import TextTransformer
from multimodal.tokens.audio.log_mel import filterbank_batch
from multimodal.train.device import compile_blocks
from multimodal.weights.folder import Checkpoint, load_folder
from multimodal.weights.load import load
from multimodal.weights.speech.conformer_torchaudio import CONFORMER


def encoder(
    folder: Path, device: str, name: str, batch: int, kind: str, compiled: bool = False, graph: bool = False,
    tiny: bool = False,
) -> Callable[[], Tensor]:  # fmt: skip
    model, images = prepare_for_inference(checkpoint(folder, name, tiny), kind, device).model, pixels(folder, device)
    if compiled:
        compile_blocks(model.image)

    @torch.inference_mode()
    def run() -> Tensor:
        return model.encode_image(images)

    return ready(run, device, graph)


def whisper(
    folder: Path, device: str, tokens: int, kind: str, graph: bool, **other: Any
) -> Callable[[], list[list[int]]]:
    """Encode, then decode the windows greedily in one batch."""
    made = prepare_for_inference(load_folder(folder / "ours"), kind, device)
    model, mel = made.model, inputs(folder, device)["mel"]
    ids = torch.tensor([about(folder)["prompt"]] * len(mel), device=device)

    @torch.inference_mode()
    def run() -> list[list[int]]:
        return first(written(model.decoder, model.encoder(mel), ids, tokens, graph, made.tokenizer.eot), tokens)

    return ready(run, device)


def writer(folder: Path, device: str, tokens: int, kind: str, graph: bool) -> Callable[[], list[list[int]]]:
    """Generate `tokens` per row; no row ends early."""
    model = prepare_for_inference(load(folder / "hub"), kind, device).model
    ids = text_random.ids(folder, device)

    @torch.inference_mode()
    def run() -> list[list[int]]:
        return written(model, None, ids, tokens, graph, -1)

    return ready(run, device)


def written(
    decoder: TextTransformer, source: Tensor | None, ids: Tensor, tokens: int, graph: bool, eos: int
) -> list[list[int]]:
    """`graph`: as CUDA graphs where `prepare_for_inference` put them in place."""
    room = ids.shape[1] + tokens
    if graph:
        step, cache = cuda_graphs.fast_step(decoder, source, None, room, last=1)
    else:
        step, cache = sampling.cross_attention_step(partial(decoder, last=1), source), decoder.new_cache(capacity=room)
    return sampling.greedy(step, ids, cache, eos=eos, max_new=tokens).ids


def recogniser(
    folder: Path, device: str, batch: int, seconds: float, kind: str, compiled: bool = False, tiny: bool = False
) -> Callable[[], Tensor]:
    """From samples to tokens; returns some of the logits."""
    plain = conformer(load_file(folder / "recogniser.safetensors"), **cuda_torchaudio.sizes(tiny))
    model = prepare_for_inference(Checkpoint(plain, source="random Conformer"), kind, device).model
    sound = list(cuda_torchaudio.waves(folder, device))
    if compiled:
        compile_blocks(model)

    @torch.inference_mode()
    def run() -> Tensor:
        frames, _, lengths = model.encode(*filterbank_batch(sound, cuda_torchaudio.BANDS))
        logits = model.ctc_logits(frames)
        assert len(ctc_greedy(logits, lengths, model.config.blank)) == len(sound)
        return logits[:, :: cuda_torchaudio.SEEN].float()

    return ready(run, device)


def conformer(
    weights: dict[str, Tensor], width: int, layers: int, heads: int, kernel: int, channels: int, vocabulary: int
) -> nn.Module:
    """The peer's model as ours; its encoder has torchaudio's names, the rest ours."""
    block = ConformerConfig(AttentionConfig(width, heads), 4 * width, kernel, "batch")
    config = ConformerEncoderConfig(cuda_torchaudio.BANDS, block, layers, 8, channels)
    model = ConformerCTC(ConformerCTCConfig(config, vocabulary, None))
    parts: dict[str, dict[str, Tensor]] = {"stem": {}, "encoder": {}, "ctc": {}}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    inner = CONFORMER.load(parts["encoder"], {"num_heads": heads, "convolution_first": False}, "random Conformer")
    model.encoder.blocks.load_state_dict(inner.model.blocks.state_dict())
    model.encoder.stem.load_state_dict(parts["stem"])
    model.ctc.load_state_dict(parts["ctc"])
    return model.eval()
