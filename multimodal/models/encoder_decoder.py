"""Text encoder-decoder: the original Transformer, T5, BART, M2M100."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.blocks.cache import Cache
from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """`encoder.vocabulary` 0: the encoder uses the decoder's embedding. `start_id`: the decoder's first id (T5: pad,
    BART and M2M100: eos)."""

    encoder: TextConfig
    decoder: TextConfig
    start_id: int


class EncoderDecoder(nn.Module):
    """Text encoder and decoder with cross-attention (Vaswani et al. 2017, figure 1)."""

    def __init__(self, config: EncoderDecoderConfig):
        super().__init__()
        self.config = config
        self.encoder, self.decoder = TextTransformer(config.encoder), TextTransformer(config.decoder)

    def encode(
        self, ids: Int[Tensor, "B S"], valid: Bool[Tensor, "B S"] | None = None, states: list[Tensor] | None = None
    ) -> Float[Tensor, "B S D"]:
        """`valid` marks real tokens of padded rows; `states`: see `Stack`."""
        return self.encoder.states(ids, valid=valid, table=self.decoder.embed, states=states)

    def decode(
        self, ids: Int[Tensor, "B T"], source: Float[Tensor, "P S D"], source_valid: Bool[Tensor, "P S"] | None = None,
        cache: Cache | None = None, last: int | None = None,
    ) -> Float[Tensor, "B N V"]:  # fmt: skip
        """Next-token logits; see `sampling.cross_attention_step`."""
        return self.decoder(ids, source, source_valid, cache=cache, last=last)

    def forward(
        self, source: Int[Tensor, "B S"], ids: Int[Tensor, "B T"], source_valid: Bool[Tensor, "B S"] | None = None,
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:  # fmt: skip
        """Next-token logits; `ids` begin with `start_id`."""
        return self.decoder(ids, self.encode(source, source_valid), source_valid, valid)
