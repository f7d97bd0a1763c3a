"""Canary: a FastConformer and a text decoder told the languages of sound and text (Puvvada et al. 2024)."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.models.conformer import ConformerEncoder, ConformerEncoderConfig
from multimodal.models.speech.seq2seq import SpeechSeq2Seq
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig


@dataclass(frozen=True)
class CanaryConfig:
    """`end_id`: of the end of a text. `project`: a linear map from the encoder's width to the decoder's."""

    encoder: ConformerEncoderConfig
    decoder: TextConfig
    end_id: int
    project: bool = False

    @property
    def vocabulary(self) -> int:
        return self.decoder.vocabulary


class Canary(SpeechSeq2Seq):
    """FastConformer and text decoder; a prompt of control tokens begins each text."""

    def __init__(self, config: CanaryConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = ConformerEncoder(config.encoder), TextTransformer(config.decoder)
        self.project = nn.Linear(config.encoder.width, config.decoder.width) if config.project else None

    def encode(
        self, features: Float[Tensor, "B F M"], lengths: Int[Tensor, "B"]
    ) -> tuple[Float[Tensor, "B T D"], Bool[Tensor, "B T"], Int[Tensor, "B"]]:
        frames, valid, lengths = super().encode(features, lengths)
        return frames if self.project is None else self.project(frames), valid, lengths
