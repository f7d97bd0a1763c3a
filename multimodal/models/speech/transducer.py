"""Transducer speech recognizer: an encoder, a prediction network over the text so far and a joint network (Graves
2012), with durations if it is a token-and-duration transducer (Xu et al. 2023)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.layers import ACTIVATIONS
from multimodal.blocks.masks import padding
from multimodal.models.conformer import ConformerEncoder, ConformerEncoderConfig

LSTM_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of nn.LSTM, in this order
State = tuple[Tensor, Tensor]  # of the LSTM: [layers B H] each


@dataclass(frozen=True)
class PredictionConfig:
    """An LSTM of so many layers and units."""

    width: int
    layers: int


@dataclass(frozen=True)
class TransducerConfig:
    """`blank`, one past the vocabulary, also begins texts. `joint`: width of the joint network. `durations`: frames
    that an output may take; none: a blank takes one, a token none. `most_symbols`: tokens in a frame before the
    next."""

    encoder: ConformerEncoderConfig
    vocabulary: int
    prediction: PredictionConfig
    joint: int
    activation: str = "relu"
    durations: tuple[int, ...] = ()
    most_symbols: int = 10

    def __post_init__(self) -> None:
        if self.durations and (min(self.durations) < 0 or max(self.durations) < 1):
            raise ValueError(f"durations: expected frames, one of them at least 1 (got {list(self.durations)})")

    @property
    def blank(self) -> int:
        return self.vocabulary


class Transducer(nn.Module):
    """RNN-T or TDT over a Conformer encoder."""

    def __init__(self, config: TransducerConfig):
        super().__init__()
        self.config, width = config, config.prediction.width
        self.encoder = ConformerEncoder(config.encoder)
        self.embed = nn.Embedding(config.vocabulary + 1, width)
        self.prediction = nn.LSTM(width, width, config.prediction.layers, batch_first=True)
        self.from_text = nn.Linear(width, config.joint)
        self.from_audio = nn.Linear(config.encoder.width, config.joint)
        self.activation = ACTIVATIONS[config.activation]
        self.head = nn.Linear(config.joint, config.vocabulary + 1 + len(config.durations))

    def encode(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T J"], Bool[Tensor, "B T"], Int[Tensor, "B"]]:
        """Encoder frames as the joint network takes them, their validity mask and their lengths."""
        frames, lengths = self.encoder(features, lengths)
        return self.from_audio(frames), padding(lengths, frames.shape[1]), lengths

    def predict(
        self, ids: Int[Tensor, "B U"], state: State | None = None
    ) -> tuple[Float[Tensor, "B U J"], State]:  # fmt: skip
        """The prediction network after each id, as the joint network takes it, and its state. A text begins with the
        blank."""
        x = self.embed(ids)
        made, state = self._step(x, state) if ids.shape[1] == 1 else self.prediction(x, state)
        return self.from_text(made), state

    def _step(self, x: Float[Tensor, "B 1 H"], state: State | None) -> tuple[Float[Tensor, "B 1 H"], State]:
        """One position; `nn.LSTM` copies its weights in each call, which takes ten times as long."""
        layers, made = range(self.config.prediction.layers), x[:, 0]
        hidden, cells = state or (x.new_zeros(len(layers), len(x), self.config.prediction.width),) * 2
        states = []
        for layer in layers:
            weights = (getattr(self.prediction, f"{part}_l{layer}") for part in LSTM_PARTS)
            states.append(torch.lstm_cell(made, (hidden[layer], cells[layer]), *weights))
            made = states[-1][0]
        hidden, cells = (torch.stack(part) for part in zip(*states, strict=True))
        return made[:, None], (hidden, cells)

    def join(self, frames: Float[Tensor, "*#B J"], texts: Float[Tensor, "*#B J"]) -> Float[Tensor, "*B W"]:
        """Logits of the tokens, the blank and the durations."""
        return self.head(self.activation(frames + texts))

    def logprobs(
        self, frames: Float[Tensor, "*#B J"], texts: Float[Tensor, "*#B J"]
    ) -> tuple[Float[Tensor, "*B V"], Float[Tensor, "*B N"]]:
        """Log-probabilities of the tokens with the blank, and of the durations (N = 0 without)."""
        logits, count = self.join(frames, texts).float(), self.config.vocabulary + 1
        return logits[..., :count].log_softmax(-1), logits[..., count:].log_softmax(-1)

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"], ids: Int[Tensor, "B U"]
    ) -> tuple[Float[Tensor, "B T U W"], Int[Tensor, "B"]]:
        """Logits of each frame after each id (U ids, the first of them the blank), and the numbers of frames."""
        frames, _, lengths = self.encode(features, lengths)
        return self.join(frames[:, :, None], self.predict(ids)[0][:, None]), lengths
