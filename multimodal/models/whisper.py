"""Whisper: a log-mel encoder and a text decoder with cross-attention (Radford et al. 2022)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.masks import key_mask
from multimodal.blocks.positions import computed_on_cpu, sinusoids
from multimodal.blocks.sdpa import preferred_kernels
from multimodal.blocks.stack import Stack, StackConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig


class FrameStem(nn.Module):
    """Two convolutions over time of width 3, the second of stride 2, each with GELU (Whisper's stem)."""

    def __init__(self, bands: int, width: int):
        super().__init__()
        self.first = nn.Conv1d(bands, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)

    def forward(self, mel: Float[Tensor, "B M F"]) -> Float[Tensor, "B T D"]:
        return F.gelu(self.second(F.gelu(self.first(mel)))).transpose(1, 2)


@dataclass(frozen=True)
class WhisperEncoderConfig:
    """`context`: positions after the stem (1500 for 30 s)."""

    bands: int
    context: int
    stack: StackConfig

    @property
    def width(self) -> int:
        return self.stack.block.attention.width

    def states(self, frames: int) -> int:
        """Number of states of so many frames."""
        return -(-frames // 2)


class WhisperEncoder(nn.Module):
    """Frame stem, fixed sinusoids and a stack."""

    def __init__(self, config: WhisperEncoderConfig):
        super().__init__()
        self.config = config
        self.stem = FrameStem(config.bands, config.width)
        # a parameter, as in the files: a fine-tuned one may differ
        shape = config.context, config.width
        positions = computed_on_cpu(shape, lambda: sinusoids(torch.arange(config.context), config.width))
        self.positions = nn.Parameter(positions, requires_grad=False)
        self.stack = Stack(config.stack)

    def forward(
        self, mel: Float[Tensor, "B M F"], states: list[Tensor] | None = None, valid: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """`valid`: states to which the others attend; None: all, padding too, as Whisper does."""
        x = self.stem(mel)
        if x.shape[1] > self.config.context:
            raise ValueError(f"mel must have at most {2 * self.config.context} frames (got {mel.shape[-1]})")
        with preferred_kernels(x):
            mask = None if valid is None else key_mask(valid)
            return self.stack(x + self.positions[: x.shape[1]], mask=mask, states=states)


@dataclass(frozen=True)
class WhisperConfig:
    encoder: WhisperEncoderConfig
    decoder: TextConfig


class Whisper(nn.Module):
    """Speech encoder and text decoder with cross-attention (Radford et al. 2022)."""

    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = WhisperEncoder(config.encoder), TextTransformer(config.decoder)

    def forward(self, mel: Float[Tensor, "B M F"], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        return self.decoder(ids, self.encoder(mel))
