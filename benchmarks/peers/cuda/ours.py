"""Our Conformer with CTC on a GPU, with the peer's weights."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.peers.cuda import torchaudio as peer
from benchmarks.peers.cuda.common import ready
from multimodal.blocks.attention import AttentionConfig
from multimodal.blocks.conformer import ConformerConfig
from multimodal.decoding.ctc import ctc_greedy
from multimodal.inference.prepare import prepare_for_inference
from multimodal.models.conformer import ConformerCTC, ConformerCTCConfig, ConformerEncoderConfig
from multimodal.tokens.audio.log_mel import filterbank_batch
from multimodal.train.device import compile_blocks
from multimodal.weights.folder import Checkpoint
from multimodal.weights.speech.conformer_torchaudio import CONFORMER


def recognizer(
    folder: Path, device: str, batch: int, seconds: float, kind: str, compiled: bool = False, tiny: bool = False
) -> Callable[[], Tensor]:
    """From samples to tokens; returns some of the logits."""
    plain = conformer(load_file(folder / "recognizer.safetensors"), **peer.sizes(tiny))
    model = prepare_for_inference(Checkpoint(plain, source="random Conformer"), kind, device).model
    waves = list(peer.waves(folder, device))
    if compiled:
        compile_blocks(model)

    @torch.inference_mode()
    def run() -> Tensor:
        frames, _, lengths = model.encode(*filterbank_batch(waves, peer.BANDS))
        logits = model.ctc_logits(frames)
        assert len(ctc_greedy(logits, lengths, model.config.blank)) == len(waves)
        return logits[:, :: peer.SEEN].float()

    return ready(run, device)


def conformer(
    weights: dict[str, Tensor], width: int, layers: int, heads: int, kernel: int, channels: int, vocabulary: int
) -> nn.Module:
    """The peer's model as ours; its encoder has torchaudio's names, the rest ours."""
    block = ConformerConfig(AttentionConfig(width, heads), 4 * width, kernel, "batch")
    config = ConformerEncoderConfig(peer.BANDS, block, layers, 8, channels)
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
