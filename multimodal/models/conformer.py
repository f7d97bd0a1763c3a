"""Conformer speech recognizer (Gulati et al. 2020) with CTC and an attention decoder (Watanabe et al. 2017)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.blocks.cache import LayerCache, WindowLayer
from multimodal.blocks.conformer import ConformerBlock, ConformerConfig, ConvState, zero_padding
from multimodal.blocks.masks import Local, key_mask, padding, window
from multimodal.blocks.masks import blocks as chunk_mask
from multimodal.blocks.positions import rotary
from multimodal.blocks.sdpa import preferred_kernels, recompute_contexts
from multimodal.blocks.subsample import Subsample, SubsampleStream
from multimodal.models.speech.seq2seq import SpeechModel
from multimodal.models.speech.wave_encoder import WaveEncoder, WaveEncoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.tokens.audio.log_mel import HOP, RATE

CHUNKED = 0.7  # share of a `dynamic` model's training batches that are seen in chunks, which is the harder task


@dataclass(frozen=True)
class ConformerEncoderConfig:
    """`subsample`: 2, 4 or 8 frames become one (convolutions with `channels`); 1: no stem, features are as wide as the
    model. `rotary`: RoPE in attention. `chunk`: frames after the stem that see each other (0: all); it needs causal
    convolutions. `left`: earlier frames that a chunk sees (0: all). `dynamic`: chunks in a stream and in most of
    the training, else the whole input (Zhang et al. 2020, "Unified streaming and non-streaming"). `near`: frames before
    and after that each sees (-1: all). `input_scale`: of the stem's output. `features`: see
    `tokens.audio.features.speech_features`."""

    bands: int
    block: ConformerConfig
    layers: int
    subsample: int
    channels: int
    rotary: bool = False
    chunk: int = 0
    drop_path: float = 0.0
    left: int = 0
    dynamic: bool = False
    near: tuple[int, int] = (-1, -1)
    input_scale: float = 1.0
    features: str = "fixed"

    def __post_init__(self) -> None:
        if self.chunk and (not self.block.conv_causal or self.block.conv_norm == "group"):
            raise ValueError(f"chunk {self.chunk} needs conv_causal and a conv_norm other than group")
        if self.chunk and self.near != (-1, -1):
            raise ValueError(f"near {self.near} and chunk {self.chunk}: expected one of them")
        if self.left and not self.chunk:
            raise ValueError(f"left {self.left} needs a chunk")
        if self.dynamic and not self.chunk:
            raise ValueError("dynamic needs a chunk")

    @property
    def seconds(self) -> float:
        """Time between states."""
        return self.subsample * HOP / RATE

    @property
    def width(self) -> int:
        return self.block.attention.width

    def states(self, frames: int) -> int:
        """Number of states of so many frames."""
        return -(-frames // self.subsample)


class ConformerEncoder(nn.Module):
    """Convolutional subsampling and a stack of Conformer blocks."""

    def __init__(self, config: ConformerEncoderConfig):
        super().__init__()
        self.config, self.checkpointing = config, False  # recompute activations in backward
        self.chunked = config.chunk > 0 and not config.dynamic  # whether an input given whole is seen in chunks
        sizes = config.bands, config.width, config.subsample, config.channels
        self.stem = Subsample(*sizes) if config.subsample > 1 else None
        self.drop = nn.Dropout(config.block.dropout)
        self.blocks = nn.ModuleList(
            ConformerBlock(config.block, config.drop_path * i / max(config.layers - 1, 1)) for i in range(config.layers)
        )

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"], states: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B"]]:
        """Encoded frames and their number in each row. Padding has no influence."""
        x, lengths = (features, lengths) if self.stem is None else self.stem(features, lengths)
        frames = x.shape[1]
        valid, mask = self._masks(lengths, frames)
        rotate = self.rotation(0, frames, x.device)
        x = self.drop(zero_padding(x, valid) * self.config.input_scale)
        with preferred_kernels(x, steady=False):
            for block in self.blocks:
                if self.checkpointing and self.training and torch.is_grad_enabled():
                    x = checkpoint(block, x, mask, valid, rotate, use_reentrant=False, context_fn=recompute_contexts)
                else:
                    x = block(x, mask, valid, rotate)
                if states is not None:
                    states.append(x)
        return zero_padding(x, valid), lengths

    def _masks(
        self, lengths: Int[Tensor, "B"], frames: int
    ) -> tuple[Bool[Tensor, "B T"] | None, Tensor | Local | None]:
        """Which frames are no padding, and those that each sees; None for all: on a CPU, outside of training."""
        valid, eager = padding(lengths, frames), not torch.compiler.is_compiling()
        if min(self.config.near) >= 0 and eager:
            return valid, Local(*self.config.near, valid)
        whole = eager and not self.training and valid.is_cpu and bool(valid.all())
        masks = [] if whole else [key_mask(valid)]
        if self.chunked or (self.training and self.config.dynamic and torch.rand(()) < CHUNKED):
            masks.append(self._seen(frames, lengths.device))
        if self.config.near != (-1, -1):
            left, right = (frames if side < 0 else side for side in self.config.near)
            masks.append(window(frames, frames, left, right, lengths.device))
        mask = reduce(and_, masks) if masks else None
        if len(masks) > 1:  # padding sees itself: a frame without keys would be NaN in a graph
            mask = mask | torch.eye(frames, dtype=torch.bool, device=lengths.device)
        return None if whole else valid, mask

    def _seen(self, frames: int, device: torch.device) -> Bool[Tensor, "T T"]:
        """True where a frame's chunk sees another frame."""
        chunk, left = self.config.chunk, self.config.left
        mask, position = chunk_mask(frames, frames, chunk, device), torch.arange(frames, device=device)
        return mask & (position >= (position // chunk * chunk)[:, None] - left) if left else mask

    def rotation(self, start: int, count: int, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """RoPE for frames from `start` on; None if the model has none."""
        if not self.config.rotary:
            return None
        return rotary(torch.arange(start, start + count, device=device), self.config.block.attention.head_size)

    def stream(self) -> "ConformerStream":
        """Raises ValueError for a model without chunks, whose frames depend on the whole input."""
        return ConformerStream(self)


class ConformerStream:
    """A chunked encoder for features in parts. Frames equal those of the whole input seen in chunks, once theirs is
    full. The stream keeps the keys and values that a chunk may see, and the convolutions' state.

    For inference in eval mode, with rows of equal length. Computes in the type of the weights."""

    def __init__(self, encoder: ConformerEncoder):
        config = encoder.config
        if not config.chunk:
            raise ValueError("streaming needs a model with chunks")
        self.encoder, self.chunk, self.seen = encoder, config.chunk, 0
        self.stem = SubsampleStream(encoder.stem) if encoder.stem is not None else None
        self.past = [
            (WindowLayer(config.left + 1) if config.left else LayerCache(), ConvState()) for _ in encoder.blocks
        ]
        self.waiting: Tensor | None = None

    @torch.inference_mode()
    def push(self, features: Float[Tensor, "B F M"], last: bool = False) -> Float[Tensor, "B T D"]:
        """Frames of the chunks that these features complete, and with `last` of an incomplete one."""
        x = features.to(next(self.encoder.parameters()).dtype)
        x = (x if self.stem is None else self.stem.push(x, last)) * self.encoder.config.input_scale
        x = x if self.waiting is None else torch.cat([self.waiting, x], 1)
        whole = x.shape[1] if last else x.shape[1] // self.chunk * self.chunk
        self.waiting = x[:, whole:]
        encoded = [self._encoded(part) for part in x[:, :whole].split(self.chunk, 1)] if whole else []
        return torch.cat([x[:, :0], *encoded], 1)

    def _encoded(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        rotate = self.encoder.rotation(self.seen, x.shape[1], x.device)
        self.seen += x.shape[1]
        for block, past in zip(self.encoder.blocks, self.past, strict=True):
            x = block(x, rotate=rotate, past=past)
        return x


@dataclass(frozen=True)
class ConformerCTCConfig:
    """`blank`: the CTC blank's id, one past the text vocabulary. `decoder` None: CTC alone. `blank_row`: of the blank
    in the weights of the family that the model came from (None: the last there, too)."""

    encoder: ConformerEncoderConfig | WaveEncoderConfig
    vocabulary: int
    decoder: TextConfig | None
    blank_row: int | None = None

    @property
    def blank(self) -> int:
        return self.vocabulary


class ConformerCTC(SpeechModel):
    """CTC and an attention decoder on one encoder (Watanabe et al. 2017): a Conformer's, or wav2vec 2.0's."""

    def __init__(self, config: ConformerCTCConfig):
        super().__init__()
        self.config, own = config, config.encoder
        self.encoder = WaveEncoder(own) if isinstance(own, WaveEncoderConfig) else ConformerEncoder(own)
        self.ctc = nn.Linear(config.encoder.width, config.vocabulary + 1)
        self.decoder = TextTransformer(config.decoder) if config.decoder else None

    def ctc_logits(self, frames: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        return self.ctc(frames)

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"], ids: Int[Tensor, "B L"]
    ) -> tuple[Float[Tensor, "B T W"], Int[Tensor, "B"], Float[Tensor, "B L V"] | None]:
        """CTC logits, their lengths and the decoder's logits."""
        frames, valid, lengths = self.encode(features, lengths)
        decoded = self.decode(ids, frames, valid) if self.decoder is not None else None
        return self.ctc_logits(frames), lengths, decoded
