"""Speech encoders: Whisper-style (Radford et al. 2022) and Conformer (Gulati et al. 2020)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.blocks.cache import LayerCache
from multimodal.blocks.conformer import ConformerBlock, ConformerConfig, FrameStem, Subsample, SubsampleStream, Tail
from multimodal.blocks.masks import blocks as chunk_mask
from multimodal.blocks.masks import over_keys, padding
from multimodal.blocks.positions import computed, rotary, sinusoids
from multimodal.blocks.sdpa import fitting, same_again
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
        positions = computed(lambda: sinusoids(torch.arange(config.context), config.width))
        self.positions = nn.Parameter(positions, requires_grad=False)
        self.stack = Stack(config.stack)

    def forward(self, mel: Float[Tensor, "B M F"], states: list[Tensor] | None = None) -> Float[Tensor, "B T D"]:
        x = self.stem(mel)
        if x.shape[1] > self.config.context:
            raise ValueError(f"{mel.shape[-1]} frames are more than the {2 * self.config.context} of the model")
        with fitting(x):
            return self.stack(x + self.positions[: x.shape[1]], states=states)


@dataclass(frozen=True)
class ConformerEncoderConfig:
    """`subsample` 2, 4 or 8 frames become one (`channels` wide convolutions); 1: features come as width-wide
    frames, without a stem. `rotary`: RoPE in attention. `chunk`: frames after the stem seen at once (0: all);
    it needs convolutions that see no later frame either. `left`: earlier frames that a chunk sees (0: all)."""

    bands: int
    block: ConformerConfig
    layers: int
    subsample: int
    channels: int
    rotary: bool = False
    chunk: int = 0
    drop_path: float = 0.0
    left: int = 0

    @property
    def width(self) -> int:
        return self.block.attention.width


class ConformerEncoder(nn.Module):
    def __init__(self, config: ConformerEncoderConfig):
        super().__init__()
        self.config, self.checkpointing = config, False  # recompute activations in backward
        if config.chunk and (not config.block.conv_causal or config.block.conv_norm == "group"):
            raise ValueError(f"chunk {config.chunk} needs conv_causal and a conv_norm other than group")
        if config.left and not config.chunk:
            raise ValueError(f"left {config.left} needs a chunk")
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
        if chunk := self.config.chunk:
            mask = mask & chunk_mask(frames, frames, chunk, x.device)
            if self.config.left:
                place = torch.arange(frames, device=x.device)
                mask = mask & (place >= (place // chunk * chunk)[:, None] - self.config.left)
        rotate = self.rotation(0, frames, x.device)
        x = self.drop(torch.where(valid[..., None], x, 0))
        with fitting(x, steady=False):
            for block in self.blocks:
                if self.checkpointing and self.training and torch.is_grad_enabled():
                    x = checkpoint(block, x, mask, valid, rotate, use_reentrant=False, context_fn=same_again)
                else:
                    x = block(x, mask, valid, rotate)
                if states is not None:
                    states.append(x)
        return torch.where(valid[..., None], x, 0), lengths

    def rotation(self, start: int, count: int, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """RoPE of the frames from `start` on, if the model has it."""
        attention = self.config.block.attention
        head_width = attention.head_width or attention.width // attention.heads
        return rotary(torch.arange(start, start + count, device=device), head_width) if self.config.rotary else None

    def stream(self) -> "ConformerStream":
        """Raises ValueError for a model without chunks: its frames need the whole."""
        return ConformerStream(self)


class ConformerStream:
    """A chunked encoder over features that come in parts: its frames equal those of the whole, as soon as their chunk
    is full. It keeps keys and values of what a chunk may see, and the tails of the convolutions.

    For inference in eval mode; all rows of a batch are of one length. Computes in the type of the weights."""

    def __init__(self, encoder: ConformerEncoder):
        config = encoder.config
        if not config.chunk:
            raise ValueError("a model without chunks has no stream")
        self.encoder, self.chunk, self.seen = encoder, config.chunk, 0
        self.stem = SubsampleStream(encoder.stem) if encoder.stem is not None else None
        self.past = [(_Recent(config.left) if config.left else LayerCache(), Tail()) for _ in encoder.blocks]
        self.waiting: Tensor | None = None

    @torch.inference_mode()
    def push(self, features: Float[Tensor, "B F M"], last: bool = False) -> Float[Tensor, "B T D"]:
        """Frames of the chunks that these features fill; with `last` of an unfilled one too."""
        x = features.to(next(self.encoder.parameters()).dtype)
        x = x if self.stem is None else self.stem.push(x, last)
        x = x if self.waiting is None else torch.cat([self.waiting, x], 1)
        whole = x.shape[1] if last else x.shape[1] // self.chunk * self.chunk
        self.waiting = x[:, whole:]
        done = [self._encoded(part) for part in x[:, :whole].split(self.chunk, 1)] if whole else []
        return torch.cat([x[:, :0], *done], 1)

    def _encoded(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        rotate = self.encoder.rotation(self.seen, x.shape[1], x.device)
        self.seen += x.shape[1]
        for block, past in zip(self.encoder.blocks, self.past, strict=True):
            x = block(x, rotate=rotate, past=past)
        return x


class _Recent(LayerCache):
    """The last `most` positions before those that are appended."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.last = most, None

    def append(
        self, key: Float[Tensor, "B K T E"], value: Float[Tensor, "B K T E"]
    ) -> tuple[Float[Tensor, "B K S E"], Float[Tensor, "B K S E"]]:
        if self.last is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(self.last, (key, value), strict=True))
        self.last = key[:, :, -self.most :], value[:, :, -self.most :]
        return key, value
