"""SpanBERT's span-boundary objective (Joshi et al. 2020, section 3.2), beside masked language modelling."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from multimodal.models.text import TextTransformer
from multimodal.models.text_config import TextConfig
from multimodal.train.objective import Summed
from multimodal.train.objectives.text.masked import MaskedBatch, encode

MOST_PLACES = 64  # of a token in its span; later ones share the last


class SpanEncoder(nn.Module):
    """An encoder, and a head that predicts a masked token from the two tokens beside its span and from its place in
    the span. Training is for the encoder."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.encoder = TextTransformer(config)
        width, inner = config.width, config.embed_width or config.width
        self.places = nn.Embedding(MOST_PLACES, width)
        nn.init.normal_(self.places.weight, std=0.02)
        self.boundary = nn.Sequential(
            nn.Linear(3 * width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(),
            nn.LayerNorm(inner),
        )  # fmt: skip

    def logits(
        self, states: Float[Tensor, "B T D"], chosen: Bool[Tensor, "B T"], places: Int[Tensor, "N"]
    ) -> Float[Tensor, "N V"]:
        """Logits of the chosen tokens, row by row."""
        rows, left, right, place = boundaries(chosen, places)
        sides = (states[rows, left], states[rows, right], self.places(place.clamp(max=MOST_PLACES - 1)))
        made = self.boundary(torch.cat(sides, -1))
        return F.linear(made, self.encoder.embed.weight, self.encoder.tied_bias)


def boundaries(chosen: Bool[Tensor, "B T"], places: Int[Tensor, "N"]) -> tuple[Int[Tensor, "N"], ...]:
    """Row, the positions before and after its run of chosen tokens, and the place in the run (from 0), of each chosen
    token. `places`: the flat positions of chosen tokens; the first and the last real token of a row must not be one."""
    index = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    before = torch.where(chosen, -1, index).cummax(1).values
    after = torch.where(chosen, chosen.shape[1], index).flip(1).cummin(1).values.flip(1)
    rows, at = places // chosen.shape[1], places % chosen.shape[1]
    return rows, before[rows, at], after[rows, at], at - before[rows, at] - 1


class SpanBoundary(Summed):
    """Cross-entropy of masked tokens by the encoder's head plus that by their span's boundary (equation 1)."""

    weights: Mapping[str, float] = {"masked": 1.0, "boundary": 1.0}

    def forward(self, batch: MaskedBatch) -> dict[str, Tensor]:
        encoder: TextTransformer = self.model.encoder
        states = encode(encoder, batch, batch.ids)
        both = {
            "masked": encoder.logits(states.flatten(0, 1)[batch.places][None])[0],
            "boundary": self.model.logits(states, batch.chosen, batch.places),
        }
        return {name: F.cross_entropy(own.float(), batch.targets, reduction="sum") for name, own in both.items()}

    def counts(self, batch: MaskedBatch) -> dict[str, int]:
        return dict.fromkeys(self.weights, len(batch.targets))
