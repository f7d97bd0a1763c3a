"""Moonshine: samples through a convolutional stem, an encoder and a text decoder, both with RoPE (Jeffries et al.
2024)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal.blocks.conformer import MaskedGroupNorm, zero_padding
from multimodal.blocks.masks import key_mask, padding
from multimodal.blocks.sdpa import preferred_kernels
from multimodal.blocks.stack import Stack, StackConfig
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import PositionConfig, TextConfig, rotary_positions
from multimodal.tokens.audio.log_mel import RATE

STRIDES, KERNELS = (64, 3, 2), (127, 7, 3)
LEAST = 895  # samples of one state


@dataclass(frozen=True)
class MoonshineEncoderConfig:
    stack: StackConfig
    positions: PositionConfig

    bands = 0  # takes samples
    chunk = 0  # a state depends on the whole recording
    features = "wave"
    seconds = 384 / RATE  # between states

    @property
    def width(self) -> int:
        return self.stack.block.attention.width


class MoonshineEncoder(nn.Module):
    """Three convolutions over samples and a stack."""

    def __init__(self, config: MoonshineEncoderConfig):
        super().__init__()
        self.config, width = config, config.width
        self.first = nn.Conv1d(1, width, KERNELS[0], STRIDES[0], bias=False)
        self.norm = MaskedGroupNorm(1, width)
        self.second = nn.Conv1d(width, 2 * width, KERNELS[1], STRIDES[1])
        self.third = nn.Conv1d(2 * width, width, KERNELS[2], STRIDES[2])
        self.stack = Stack(config.stack)

    def forward(
        self, features: Float[Tensor, "B F"], lengths: Int[Tensor, "B"], states: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """Encoded frames and their number in each row. Padding has no influence; shorter audio is zero-padded to one
        frame."""
        x = F.pad(features, (0, max(0, LEAST - features.shape[1])))[:, None]
        counts, lengths = [], lengths.clamp(min=LEAST)
        for kernel, stride in zip(KERNELS, STRIDES, strict=True):
            counts.append(lengths := (lengths - kernel) // stride + 1)
        x = torch.tanh(self.first(x)).transpose(1, 2)
        x = self.norm.masked(x, padding(counts[0], x.shape[1])).transpose(1, 2)
        x = F.gelu(self.third(F.gelu(self.second(x)))).transpose(1, 2)
        valid = padding(lengths, x.shape[1])
        rotate = rotary_positions(
            self.config.positions, torch.arange(x.shape[1], device=x.device), self.config.stack.block.attention
        )
        with preferred_kernels(x, steady=False):
            x = self.stack(x, mask=key_mask(valid), valid=valid, rotate=rotate, states=states)
        return zero_padding(x, valid), lengths


@dataclass(frozen=True)
class MoonshineConfig:
    """`start_id`: the decoder's first id; `end_id`: of the end of a text."""

    encoder: MoonshineEncoderConfig
    decoder: TextConfig
    start_id: int
    end_id: int

    def __post_init__(self) -> None:
        if not 0 <= self.start_id < self.vocabulary:
            raise ValueError(f"start_id {self.start_id} is outside {self.vocabulary} tokens")

    @property
    def vocabulary(self) -> int:
        return self.decoder.vocabulary


class Moonshine(SpeechSeq2Seq):
    """Speech encoder and text decoder with cross-attention; texts begin with `start_id`."""

    def __init__(self, config: MoonshineConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = MoonshineEncoder(config.encoder), TextTransformer(config.decoder)
