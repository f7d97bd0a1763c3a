"""Encoder-decoders for speech: Whisper's, and a Conformer with CTC and attention outputs."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.blocks.masks import padding
from multimodal.models.speech import ConformerEncoder, ConformerEncoderConfig, SpeechEncoder, SpeechEncoderConfig
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig


@dataclass(frozen=True)
class SpeechToTextConfig:
    encoder: SpeechEncoderConfig
    decoder: TextConfig


class SpeechToText(nn.Module):
    """Speech encoder and text decoder with cross-attention (Radford et al. 2022)."""

    def __init__(self, config: SpeechToTextConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = SpeechEncoder(config.encoder), TextTransformer(config.decoder)

    def forward(self, mel: Float[Tensor, "B M F"], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        return self.decoder(ids, self.encoder(mel))


@dataclass(frozen=True)
class JointConformerConfig:
    """CTC and attention over one encoder (Watanabe et al. 2017). `blank`: the CTC blank's id, which is one
    past the text vocabulary. `decoder` None: CTC alone."""

    encoder: ConformerEncoderConfig
    vocabulary: int
    decoder: TextConfig | None

    @property
    def blank(self) -> int:
        return self.vocabulary


class JointConformer(nn.Module):
    def __init__(self, config: JointConformerConfig):
        super().__init__()
        self.config = config
        self.encoder = ConformerEncoder(config.encoder)
        self.ctc = nn.Linear(config.encoder.width, config.vocabulary + 1)
        self.decoder = TextTransformer(config.decoder) if config.decoder else None

    def encode(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Bool[Tensor, "B T"], Int[Tensor, "B"]]:
        """Encoder frames, which of them are real, and how many."""
        frames, lengths = self.encoder(features, lengths)
        return frames, padding(lengths, frames.shape[1]), lengths

    def ctc_logits(self, frames: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        return self.ctc(frames)

    def attend(
        self, ids: Int[Tensor, "B T"], frames: Float[Tensor, "P S D"], valid: Bool[Tensor, "P S"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        """Next-token logits of the attention decoder."""
        return self.decoder(ids, frames, valid, cache=cache)

    def forward(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"], ids: Int[Tensor, "B L"]
    ) -> tuple[Float[Tensor, "B T W"], Int[Tensor, "B"], Float[Tensor, "B L V"] | None]:
        """CTC logits, their lengths, and the decoder's logits."""
        frames, valid, lengths = self.encode(features, lengths)
        decoded = self.attend(ids, frames, valid) if self.decoder is not None else None
        return self.ctc_logits(frames), lengths, decoded
