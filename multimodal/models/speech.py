"""Speech encoders: Whisper-style (Radford et al. 2022) and Conformer (Gulati et al. 2020)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.blocks.conv import ConformerBlock, ConformerConfig, FrameStem, Subsample
from multimodal.blocks.masks import blocks as chunk_mask
from multimodal.blocks.masks import over_keys, padding
from multimodal.blocks.positions import rotary, sinusoids
from multimodal.blocks.stack import Stack, StackConfig


@dataclass(frozen=True)
class SpeechEncoderConfig:
    """`context`: positions after the stem (1500 for 30 s)."""

    bands: int
    context: int
    stack: StackConfig

    @property
    def width(self) -> int:
        return self.stack.block.attention.width


class SpeechEncoder(nn.Module):
    """Frame stem, fixed sinusoids and a stack, over windows of one length."""

    def __init__(self, config: SpeechEncoderConfig):
        super().__init__()
        self.config = config
        self.stem = FrameStem(config.bands, config.width)
        # a parameter, since the files have it and a fine-tuned one may differ
        self.positions = nn.Parameter(sinusoids(torch.arange(config.context), config.width), requires_grad=False)
        self.stack = Stack(config.stack)

    def forward(self, mel: Float[Tensor, "B M F"], states: list[Tensor] | None = None) -> Float[Tensor, "B T D"]:
        x = self.stem(mel)
        if x.shape[1] > self.config.context:
            raise ValueError(f"{mel.shape[-1]} frames are more than the {2 * self.config.context} of the model")
        return self.stack(x + self.positions[: x.shape[1]], states=states)


@dataclass(frozen=True)
class ConformerEncoderConfig:
    """`subsample` 2, 4 or 8 frames become one (`channels` wide convolutions); 1: features come as width-wide
    frames, without a stem. `rotary`: RoPE in attention. `chunk`: frames after the stem seen at once (0: all);
    it needs convolutions that see no later frame either."""

    bands: int
    block: ConformerConfig
    layers: int
    subsample: int
    channels: int
    rotary: bool = False
    chunk: int = 0
    drop_path: float = 0.0

    @property
    def width(self) -> int:
        return self.block.attention.width


class ConformerEncoder(nn.Module):
    def __init__(self, config: ConformerEncoderConfig):
        super().__init__()
        self.config, self.checkpointing = config, False  # recompute activations in backward
        if config.chunk and (not config.block.conv_causal or config.block.conv_norm == "group"):
            raise ValueError(f"chunk {config.chunk} needs conv_causal and a conv_norm other than group")
        stemless = config.subsample == 1
        self.stem = None if stemless else Subsample(config.bands, config.width, config.subsample, config.channels)
        self.drop = nn.Dropout(config.block.dropout)
        self.blocks = nn.ModuleList(
            ConformerBlock(config.block, config.drop_path * i / max(config.layers - 1, 1)) for i in range(config.layers)
        )

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"], states: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """Frames and how many of each row are real. What lies in the padding does not matter."""
        if self.stem is not None:
            x, lengths = self.stem(features, lengths)
        else:
            x = features
        frames = x.shape[1]
        valid = padding(lengths, frames)
        mask = over_keys(valid)
        if self.config.chunk:
            mask = mask & chunk_mask(frames, frames, self.config.chunk, x.device)
        attention = self.config.block.attention
        head_width = attention.head_width or attention.width // attention.heads
        rotate = rotary(torch.arange(frames, device=x.device), head_width) if self.config.rotary else None
        x = self.drop(torch.where(valid[..., None], x, 0))
        for block in self.blocks:
            if self.checkpointing and self.training and torch.is_grad_enabled():
                x = checkpoint(block, x, mask, valid, rotate, use_reentrant=False)
            else:
                x = block(x, mask, valid, rotate)
            if states is not None:
                states.append(x)
        return torch.where(valid[..., None], x, 0), lengths
